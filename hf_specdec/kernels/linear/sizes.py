"""The largest inputs of the kernel for few rows."""

import torch

MOST_ROWS = 16  # the narrow side of the kernel's tile; from 32 rows on cuBLAS was as fast
MOST_WEIGHTS = 3  # of one launch: queries, keys and values
DTYPES = (torch.bfloat16, torch.float16)
