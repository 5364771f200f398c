"""A fuzzer of every socket of a cluster, with honest streams beside it.

    .venv/bin/python -m tests.fuzz --seconds 60 [--seed N] [--only http,grpc] [--case NUMBER]

- `targets`: the list of what is fuzzed
- `case`: one exchange, drawn from (seed, target, number) alone
- `attacker`: a process that fuzzes one target
- `values`, `json_text`, `wire_messages`: generators of values, bodies and internal messages
- `http_api`, `grpc_api`, `operator_calls`, `router_peer`, `page_holders`, `false_workers`, `router_orders`,
  `store_calls`, `store_replies`, `store_pages`, `helper_pipes`, `plain_ports`: one target each
- `victims`: processes that have a fuzzer as their router, as their store or as their workers
- `false_router`, `false_store`, `false_helper`: such peers
- `run`: the cluster, the honest streams and the verdict

A target knows how an exchange may end. Everything else is a finding: it is printed with its seed, its number and the
bytes that were sent.
"""
