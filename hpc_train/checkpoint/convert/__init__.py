"""Steps from and to other layouts and other libraries' files.

No code from a file runs, and every size in it is checked before use.

rewrite             write a step from tensors that are read a bounded part at a time
model_config        config.json of transformers, and whether tensors make that model
safetensors_files   one file, or several with an index
dcp                 torch.distributed.checkpoint: written by torch, read by us
torch_files         torch.save, read without torch.load
torch_pickle        the tensors that the pickle within describes, and where its records are
pickle_reader       a pickle as data
"""
