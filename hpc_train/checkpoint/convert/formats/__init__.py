"""Files of other libraries: DCP, torch.save, safetensors and PEFT. Nothing in them is ever unpickled."""
