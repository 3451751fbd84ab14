"""The cost of a step's communication on a fabric: collective_phases.py cuts collectives into messages,
collective_messages.py loads the fabric with them, cost_model.py adds up a step, and dragonfly.py bounds what routing
adds.
"""
