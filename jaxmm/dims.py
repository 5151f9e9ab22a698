"""The axis letters that every array name and shape annotation uses. Host only.

    A  rope axes (3: time, height, width)      M  vision rows
    B  requests (state slots of a batch)       N  patches of an encode lane
    C  head channels                           P  pages in the pool
    D  text width                              Q  pages per request
    E  encoder width                           R  rows of the arena
    F  MLP width                               S  token slots per page
    G  query heads per KV head (H = K * G)     T  tokens of a step
    H  query heads                             U  feature values of a patch
    I  items                                   V  vocabulary
    J  blocks of a lane, or keys of one block  W  patches per window
    K  KV heads                                X  encoder width of merged patches (4 E)
    L  layers

Array names end in their letters (`text_TD`); annotations spell them (`Float[Array, "T D"]`).
"""
