"""Shared set-up: one thread per worker, so that parallel workers do not fight over the cores."""

import torch

torch.set_num_threads(1)
