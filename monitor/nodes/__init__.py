"""Several machines (nodes) that train one run: the first one's monitor leads, each other one has a monitor of its own.

Decision: the nodes ask, the leader answers. A node behind a router can then take part, only one port is opened, and a
cut link is noticed by both sides with no more than a clock. The leader's answer is the state that the node is to be in
(idle, prepare, run, exit), never an event: a lost or doubled message changes nothing.

Two rules make two trainers impossible. A node that has had no answer for `nodes.lost_s` kills its ranks by itself. And
the leader starts an attempt only when every node has said, since the last attempt ended, that nothing of it is alive.

wire.py: the messages, signed and checked · leader.py: what the leader knows and wants · endpoint.py: its HTTP server ·
node.py: the monitor of a node · files.py: what a node without a shared disk copies from the leader.
"""
