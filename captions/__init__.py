"""Writes captions of images with a model: Florence-2, a tagger, or a server that speaks OpenAI's protocol.

It runs in a process of its own (ui/dataset/captioning.py), so that it outlives the page that started it, and no model
is loaded into the page's server. Each caption is stored as soon as it is known.
"""
