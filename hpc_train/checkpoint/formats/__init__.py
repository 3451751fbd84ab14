"""Formats of other libraries, each read and written by that library itself.

family_config       config.json of transformers, both ways
safetensors_files   one file, or several with an index
dcp                 torch.distributed.checkpoint
pickled             torch.save, read with weights_only
fit                 do these tensors make that model?
"""
