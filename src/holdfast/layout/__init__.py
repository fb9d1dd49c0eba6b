"""Where the elements of a logical tensor lie. Pure: no torch.distributed, no input or output."""
