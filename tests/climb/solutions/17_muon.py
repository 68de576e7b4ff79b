import torch
from torch import Tensor

POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


def muon(update: Tensor) -> Tensor:
    tall = update.shape[0] > update.shape[1]
    X = update.T if tall else update
    X = X / (1.02 * torch.linalg.norm(X) + 1e-7)
    for a, b, c in POLAR_EXPRESS:
        A = X @ X.T
        X = a * X + (b * A + c * A @ A) @ X
    return X.T if tall else X
