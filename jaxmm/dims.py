"""The axis letters that every array name and shape annotation uses. Host only.

    A  rope axes (3: time, height, width)      N  patches of an encode lane
    B  requests (state slots of a batch)       P  pages in the pool
    C  head channels                           Q  pages per request
    D  text width                              R  rows of the arena
    E  encoder width                           S  token slots per page
    F  MLP width                               T  tokens of a step
    G  query heads per KV head (H = K * G)     U  feature values of a patch
    H  query heads                             V  vocabulary
    I  items                                   W  patches per window
    J  blocks of a lane, or keys of one block  X  encoder width of merged patches (4 E)
    K  KV heads                                Y  lanes of all KV rows of a token (K * J)
    L  layers                                  Z  levels of an arena row, or experts
    M  vision rows                             O  words of a token mask (V / 32)

In pages of the portable forms and of the CPU's kernels J is the KV rows of a token: K keys, then
K values. In the Pallas TPU kernels J is the lanes of a stored KV or arena row, X the lanes of all
query heads (H * C).

Array names end in their letters (`text_TD`); annotations spell them (`Float[Array, "T D"]`).
"""
