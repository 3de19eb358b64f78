"""The API: images, settings and runs as named endpoints, for gradio_client, curl and, on request, MCP."""
