"""The live page of a testbed that is up: `/dashboard`, what it shows, and what it lets people do.

Read `mount` first (the routes, and what the gateway gives it), then `feed` (one snapshot a second, for as long as
somebody watches) and `troubles` (faults by hand, each with its end). `picture`, `recent` and `link_log` read what the
gateway, the workers and the link's agent note down anyway; a request costs the same whether somebody watches or not.
`assets/` is the page; `vendor.sh` says where its charts' library is from.
"""
