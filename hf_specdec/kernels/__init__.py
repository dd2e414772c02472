"""The tensor operations of the decoding loop.

Each operation is a folder: its definition in plain torch (`reference.py`, which also runs where nothing is faster), its Triton kernels
(`triton.py`, imported only on devices that run them), in some folders its calls of the native library for CPUs (`native.py`), and an
`__init__.py` in which `dispatch.operation` wraps the definition: it calls the implementation for a device.
"""
