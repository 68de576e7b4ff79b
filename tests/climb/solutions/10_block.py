from types import SimpleNamespace

from torch import Tensor


def block(
    dout: Tensor, saved: SimpleNamespace, w: SimpleNamespace, ops: SimpleNamespace
) -> tuple[Tensor, dict[str, Tensor]]:
    g = {}
    dact, g["fcproj_weight"], g["fcproj_bias"] = ops.linear(dout, saved.act, w.fcproj_weight)
    dfc = ops.gelu(dact, saved.fc)
    dln2, g["fc_weight"], g["fc_bias"] = ops.linear(dfc, saved.ln2, w.fc_weight)
    dbranch, g["ln2_weight"], g["ln2_bias"] = ops.layer_norm(dln2, saved.mid, w.ln2_weight)
    dmid = dout + dbranch
    dy, g["proj_weight"], g["proj_bias"] = ops.linear(dmid, saved.y, w.proj_weight)
    dqkv = ops.attention(dy, saved.y, saved.lse, saved.qkv)
    dln1, g["qkv_weight"], g["qkv_bias"] = ops.linear(dqkv, saved.ln1, w.qkv_weight)
    dbranch, g["ln1_weight"], g["ln1_bias"] = ops.layer_norm(dln1, saved.x, w.ln1_weight)
    return dmid + dbranch, g
