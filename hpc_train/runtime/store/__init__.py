"""Key-value store of the job: torch's interface over connections that need the job's secret.

protocol.py  the handshake, and frames that carry a code of who sent them
server.py    the keys, in a thread of process 0
client.py    a torch.distributed.Store of every process
exchange.py  values, lists and gates over it, before there is a process group
"""
