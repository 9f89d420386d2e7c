"""A model that imported the function's name, as some do."""

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from tests.models.attention_helper import attend


class Attends(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.unsqueeze(1)
        return scaled_dot_product_attention(x, x, x).squeeze(1)


class AttendsThroughHelper(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return attend(x)
