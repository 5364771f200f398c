"""The operator's API: status, explain, pins, drain, roles and profile, as JSON over a Unix socket.

Owns the socket, what is admitted there, and the questions to the cluster's other routers. Serves no client of the
cluster. `baton.operator_api` has the calls and their answers.
"""
