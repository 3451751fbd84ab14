"""Formats of other libraries. No code from a file runs, and every size in a file is checked before use.

family_config       config.json of transformers, both ways
safetensors_files   one file, or several with an index; by the library of that name
dcp                 torch.distributed.checkpoint: written by torch, read by us
dcp_metadata        its metadata, a pickle
pickled             torch.save, read without torch.load
torch_pickle        the tensors that the pickle within describes
zip_records         where its records are
pickle_values       a pickle as data
mapped_files        tensors as views of a file
bounded_files       regular files of a bounded size
fit                 do these tensors make that model?
"""
