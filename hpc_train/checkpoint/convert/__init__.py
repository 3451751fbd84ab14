"""Reshard steps; import and export the files of other libraries.

No code from a file is run, and every size in it is checked before use.

rewrite             write a step from any source of tensors, in bounded memory
tensor_sources      the tensors of a committed step, or of a state dict, as such a source
model_config        config.json of transformers; check that tensors fit a model
hf_config/          what a config.json says, by families; what published files have beside the weights
formats/            files of other libraries, of which these are the largest:
safetensors_files   safetensors: one file, or several with an index
dcp                 torch.distributed.checkpoint, written through torch, read without it
torch_files         files of torch.save, read without torch.load
torch_pickle        the tensors that the pickle of such a file describes, and the places of its records
pickle_reader       read a pickle as data
"""
