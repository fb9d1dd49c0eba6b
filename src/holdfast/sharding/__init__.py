"""From live tensors of torch's parallel styles to logical tensors: global shape, layout, and this rank's memory."""
