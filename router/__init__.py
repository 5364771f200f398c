"""The router: front doors, tokenizing, a request's life, placement and admission. The only control path."""
