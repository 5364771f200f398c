"""Grafana dashboards and Prometheus alerts of a cluster.

Owns `dashboards/` (JSON, edited by hand or in Grafana), `provisioning/` (how Grafana finds them), and `prometheus/`
(what to scrape, and the alerts). It never talks to a cluster: the metrics are those of `baton/metrics.py`.
"""
