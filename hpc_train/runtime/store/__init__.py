"""Key-value store of the job: torch's interface over connections that need the job's secret.

protocol.py    the handshake, and frames that carry a code of who sent them
key_values.py  keys, values, and the requests that wait for them
server.py      serves them, in a thread of process 0
connection.py  a process's connections to the server
client.py      a torch.distributed.Store of every process, over them
exchange.py    values, lists and gates over any store, before there is a process group
"""
