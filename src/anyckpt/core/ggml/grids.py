"""The code books of the IQ types: which points of a lattice their indices stand for.

Each grid is a rising list of codes; a code packs 8 levels of 2 bits, or 4 of 3 bits, lowest first. Levels are looked up
in `LEVELS`. The lists are those of `ggml-quants.c` (llama.cpp build 11434), here as differences: low bytes, then high
bytes, deflated. A point's sign bits are 7 plus their parity (`SIGNS`).
"""

from __future__ import annotations

from base64 import b85decode
from functools import cache
from typing import TYPE_CHECKING, Any
from zlib import decompress

import numpy as np

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]

SIZES = {"iq2xxs": 256, "iq2xs": 512, "iq2s": 1024, "iq1s": 2048, "iq3xxs": 256, "iq3s": 512}
LEVELS = {
    "iq2xxs": (8, 25, 43), "iq2xs": (8, 25, 43), "iq2s": (8, 25, 43), "iq1s": (-1, 0, 1),
    "iq3xxs": (4, 12, 20, 28, 36, 44, 52, 62), "iq3s": (1, 3, 5, 7, 9, 11, 13, 15),
}  # fmt: skip

SIGNS = np.array([i | (i.bit_count() & 1) << 7 for i in range(128)], np.uint8)
"""7-bit sign index -> 8 sign bits; the number of minus signs is even."""


@cache
def codes(name: str) -> Array:
    """The codes of a grid, uint16, rising."""
    planes = np.frombuffer(decompress(b85decode(_PACKED)), np.uint8).reshape(2, -1).astype(np.uint16)
    differences = planes[0] | planes[1] << 8
    start = 0
    for other, size in SIZES.items():
        if other == name:
            return np.cumsum(differences[start : start + size], dtype=np.uint16)
        start += size
    raise KeyError(name)


@cache
def grid(name: str) -> Array:
    """The points of a grid: int8 of shape (size, 8) or, for the IQ3 types, (size, 4)."""
    width, bits = (4, 3) if name.startswith("iq3") else (8, 2)
    levels = np.array([*LEVELS[name], *[0] * 8], np.int8)
    shifts = np.arange(width, dtype=np.uint16) * np.uint16(bits)
    points: Array = levels[codes(name)[:, None] >> shifts & np.uint16((1 << bits) - 1)]
    return points


_PACKED = (
    "c-rk(U5p#m72bR9J$LTRT+i6Mw#Qz3*W>-q52>3dBp^x^ngVGQDp93QHZI<!C|R<EMzl03T8Rd=Z+)yPDg=#arASpJnyL>}5hyBZ)rUTmcV6"
    "08gjBT;NEH%2XJ-7fn+-u(Ad7^hUEiN`&(C+hbMEyBNC}R#pdpghxUvqW(v=o>9WJgwy!5=Z1zOXUrnJQlea}rtg^Nz>aNI#!snW^2*Y5lC="
    "zApBh-WOWno7%?`%Uwjso>0k7r*gJ`CVyShn~lmuD%B5-iZcWX}k^}(pveqho*O5to-2jZ={Az;E|E@@u3E;g$IMt7fofU`lHcz1j*vH6K?a"
    "ZqvwrloF%h%|Ksm{2p8Y~*6#}D=sSP=z_u1%JpR_hm(ho3-h30xfkQ787vBCiM-g9s@R4T^#IHi`zqVLke)jBNu1!tlTEF_&Bl~~ye&ygFN7"
    "DE~Iy9(e-;4tPM`t-(A(3>+8VdP*I&885@4|*dkVMg!C^RlfTONl8)-t5APD&PHug$QS3$c0HTi&3;deN|oRuNW7Z7aUqTSBK;C$+8X#r>~S"
    "2KE&9K8MTio@i$#_)NS^|IEZoQ;#j2l(rgOKU8>VrTVi)1Lghu#{ar-vGTZv^}hGK8?uZO#07|=>lq%2H|Hqv^~KZPz4j`LguyF?eYX122Lp"
    "gwmlzs&^YH0*!i#3yH5bh<AG)Voyem9%X%4=&#)^WO>GsUr!%vt0*TU|1p1k(YM}k)d0JLBZ+8lSmT#1)p(oh^Acf~s{9A5tZqrWf{`{!Wpv"
    "HD{s7(K~!+OszGz<>5#z^_{K_8E9BfBe^fKYE#XUG{!>)f`&{J@xJQ^6`J{d!`KfqUrn?UWGH&o8%v4lsbag-k4wMpk&@lD?5E}d36_}7j!r"
    "1=qazK2i@dMx`;Or&Ms$)GW^f?En+kf#jxCF`_gTsg5mjs3^dFgSs54~?;TC!^46Q)gzV=iy=Y0hm3IwWzKN5=3+!pn<<`!27HOlmxz?Ae-t"
    "#!u{cuziM_Bi~G$PwzR1<w(MZ>r~2$Ls!z-?lzJkC{6y^{KTZ%j&l`fTNanLe>O+VOQ+ustB$p}ee*j-j=695{bd%<QcyceX>Q4)4zl@0M4&"
    "hSw)*Lry*d>1uRov+aTUr14zu&%L>%WmKP<CP=-EN;mjaT_wMcc5z5a%bVQ!^v|j4kMCRAS?PAOUcjv)C815oGvo**quNGvcyP7nWMeZQseN"
    "*DN)z~KSKc@K#@(<GcT;_KIP65kyF!OfFK)o_gxh^^@?{S9$@UTV{_|XjhBEP}`NizZhM06hGm&iTNUc*n_@~L|{;>B2pf<2HmDa!VsZZ3bg"
    "s?^fpJ$7Lrc(F`L=*|Y1n-~f?bodFF`|K^ltW)<XtQoCdSbV+9VtXe3lX9gG)}n~<rPzjrmMJ+U}pr%x|MilpcMx$oT43H)I*_Yut46}Ve3Z"
    "KSZOjnEfUF;+(MD8uR48lV4b`Wz;0k8ken?FRMQUgpuu6$W$u%s25U+{>Lcye(NXL^&DBW;p&tp2{6wQj79#*5Aq`b%kV*Wk2*;BhQUk(B-m"
    "fboLtMcyYlwUb7=*$qkO?&bY&y|{*f4?uK)I9)U@{Ab5kqx4MS^_Epy*8*G&=#rmL!aZuchrc{S?!qrQVyJ3c2H?p@JnG(5NS@HBpKptu{IS"
    "r20EPIF|D33sVEnJ3UB*EU<AR6LbxkZZa`BA~NiYQ`uHxcqp+L&bVn`*@Ffb83HoNfN?`gFcm)I%!TR;@m)?*y&%!U*e`U7DxZl_)<_H)8gl"
    "J~=w*ppD}OWO3G_l%`^b{!wo-l)8b%2ZX_aB9Dk3o1>RN^Vgp>5$Bs+vuM+v2sNG=zu?UYbdBC4MF&VuLmaQ~*uW>=w;atPT1rgp8Iq(A0-C"
    "nXiBaFC+TTxE@rZtw-0#nGlzl9tIVGFQfwXC=HPVbj=D%10th8mvfNi%g0m#g6UNSusr6%v|4W?=<OBy-9*wn?{h)w<ldu>5+lUsw$I_Lc@b"
    "oiSyERYiXXy5a}R9nZkoS+4_y4SClfz3ENdU)F_A&6eTS%Wg^!kM0p}1uf?QXK~_p(Cn1p)N>Ytco@g|#4fli<l=A|qAk8c>?<tByk#E`SBr"
    "DkltpR(%oaiJaD|hu6BoiPeD1Pn-?7*U9eGP(An}!D(WrYgZBOQ(c^%R9hbahPKI>9M&f+-XcvfyTUt$_9^gK7m~2j3<{8=)ow1$MDlG|bR-"
    "Wy8~Yay1YdM1wlj@laQsr~2zlpQV<WQ_R0zxI(`#$OE$9tAK=cX-5fGG0{p5M-d-Y&AMKvrzPUvYgN?ufr}^19u1_tSy<PVCF~q3a!MgxA6&"
    "YkmX=V~^EhJ>`XVKC18n*P=&-Fu=9R36Fm@t&xdr21#vzg?X)a{b#$LxYN{MJQ9!WPPyyi^P+X$7T6EbnNTR9FW3<x4pr@#*$kBiw8G54x&_"
    "I~2-Jl-b?x5ebiM)~UI^NsXnHp7K@b{GUX-$#MCOlo&aliYnxAC!DjgLd7GP4Rn_1FL$M1^v89QOFvBP5T*Dz&Q>>HGqo*49s}Q^n@O1=GR#"
    "dsioILWO~i(vjdTSmPP;&$e`m^LDA4*H+^epnXU;?o(_~2;7^Yg(YK)VSbkqrR8R`?EKPsliwaO(e~IVLl!m~~<$X21phm~+u^>)_6hD7}R6"
    "BIRQez^OIgu+mYPV_zm7-VsI`|P^Oi-edClx-_0CS~$IQo@vOlw<fjFuKkMLz(mjuk_Z*M-T(tltbu$0P)MqsZud)Cgj;V}fj(=$pHPy?F>G"
    ";>p<={a|zU%L~C?D$UXSZf|D|%ekP`r1Xs*9wAVPBT0u-8p%Zl#F3KMsNqXV#q3ZWX`zUAG?hxTP)-`nSb@|EaulGiXsD$QJt8Q{D+rNlB`A"
    "c{S9m3-iiu7(#T5`xyCNJUaFJ>U=ogG9*$XW_>9Gr>Pbe&CpIpiTx0O;N8O|%2V}R&RRt0TRm5eWElD~7@IY3MHpH5Vy^f;lO@+cmuTt2D;U"
    "%S$g)VUpWbHdLVK(DTfDhED}JFL)QG^hr(;ky}fc~8-VBCJxQCu=S-A~4iAoPt(4ht7FkZfq<jcl~LKgzP&`-XoSc8fjVtMCD;9HFXDO+cb>"
    "&qH4iwRtv=n`o6AeQc345WrKWnW9@pVa}kO#hnB#x9=+Jd;6Mz)0Y<iz&pQ+4QSGCq_h-022&rm{rP>bIPqZTetMiT@LY*_`6si>&lquDfo%"
    "uMLAGyUxe9RrZ`L@_Zrne?&AW9!?05-KE1|ryBqB%sHIY?|CNR0?Nq7%((Wa}TXbvfLE3UO;a;-)G}TMSa%G77Qzw4aS69Ybj@eOxER@b@On"
    "O7-ClD#XW5*r!W}PemDShcLt^>!r9Ik<xa_r}#8;CT>#(Z|9WgeU&}~C-F9P_7??y<RKxpUEOchBfP^b|LpDIopoYs{+G6Wwzh5ox4(;@Ywv"
    "J-11Iiad2EA*{7Dsn_}sAdPG3RWyB&P-`Qo!JKmP|)qetu"
)
