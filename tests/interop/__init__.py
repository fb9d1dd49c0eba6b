"""To and from others: safetensors, Hugging Face directories, torch files; and the data files as they are."""
