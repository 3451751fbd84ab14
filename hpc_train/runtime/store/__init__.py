"""The job's key-value store: torch's interface over connections that only holders of the job's secret can open.

wire.py    the handshake, and frames that carry a code of who sent them
server.py  the keys, in a thread of process 0
client.py  a torch.distributed.Store of every process
"""
