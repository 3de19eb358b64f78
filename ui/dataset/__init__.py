"""Step 1 of the page: the images of a draft, their captions, and what is checked and changed in them."""
