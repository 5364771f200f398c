"""Grafana dashboards and Prometheus alerts of a cluster, and the generator of the dashboards.

Owns `boards` (what the dashboards show), `dashboards/` (the JSON that `python -m deploy.grafana` makes of it),
`provisioning/` (how Grafana finds both), and `prometheus/` (what to scrape, and the alerts). It never talks to a
cluster: the metrics are those of `baton/metrics.py`.
"""
