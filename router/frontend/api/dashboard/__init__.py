"""The page at /dashboard: its files, and the routes of its data.

Owns the page's files, its headers and the number of its viewers.
Never makes the data: `router.frontend.dashboard_feed` does, and the operator's calls give it out.
"""
