"""The durable store of a run: where its files are copied to, who may write them, how an empty machine gets them back.

`places` reads and writes bytes, whatever keeps them. `lease` decides which machine writes. `manifest` says which files
make a run, and `copies` pushes them, prunes old ones and restores. Nothing here starts a process: `agent` does.

The layout of a store, for each run (STORE/SLUG/): `files/SHA256` the contents of files, each once ·
`manifests/LEASE-NUMBER.json` what belongs to the run at one moment, written last · `lease/NUMBER.json` the claims of
machines · `status.json`, `requests/…` what the page of a fleet reads and writes.
"""
