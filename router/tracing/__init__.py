"""OpenTelemetry spans of requests: one tree for each, made when the request has ended, of times that the router has.

Owns which spans there are, and their export. Workers and stores know nothing of spans, so they cost them nothing.
Never holds a prompt's or an output's text, and never delays or fails a request.
"""
