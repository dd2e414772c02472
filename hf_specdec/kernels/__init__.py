"""The tensor operations of the decoding loop.

Each operation is a folder: its plain definition in torch (`reference.py`, also the CPU path), its Triton kernels (`triton*.py`,
imported only on devices that run them), and an `__init__.py` whose functions choose between the two by device.
"""
