"""Operations of TensorFlow that layers use, and that are known to keep samples apart.

They compute with the entries of each sample by themselves where samples are on axis 0 (`APART`), or
where they are on another axis and `Reading` has looked at the axes that an operation computes along
(`APART_INSIDE`). What is not listed may put samples together: a call of a layer that uses it is not
split.
"""

from __future__ import annotations

from ga_model.reading._operations import (
    ALONG_LAST_AXIS,
    ELEMENTWISE,
    KEEPS,
    MIXING,
    OF_IMAGES,
    OF_LABELS,
    OF_MATRICES,
    REDUCTIONS,
    STRUCTURAL,
    names,
)

_BY_ENTRY = names(
    "Angle ApproximateEqual AsString BesselI0 BesselI1 BesselJ0 BesselJ1 BesselK0 BesselK0e "
    "BesselK1 BesselK1e BesselY0 BesselY1 Betainc BiasAddV1 Bitcast BitwiseAnd BitwiseOr "
    "BitwiseXor Bucketize CheckNumericsV2 Complex ComplexAbs Conj Dawsn Dequantize Erfinv Expint "
    "FakeQuantWithMinMaxArgs FakeQuantWithMinMaxVars FakeQuantWithMinMaxVarsPerChannel FresnelCos "
    "FresnelSin Igamma IgammaGradA Igammac Imag Inv Invert LeftShift LookupTableFind "
    "LookupTableFindV2 Mod Ndtri NextAfter Polygamma PopulationCount QuantizeAndDequantize "
    "QuantizeAndDequantizeV2 QuantizeAndDequantizeV3 QuantizeAndDequantizeV4 Real RegexFullMatch "
    "RegexReplace RightShift Spence StaticRegexFullMatch StaticRegexReplace StringJoin "
    "StringLength StringLower StringStrip StringToHashBucket StringToHashBucketFast "
    "StringToHashBucketStrong StringToNumber StringUpper Substr TruncateMod Zeta "
    "EluGrad InvGrad LeakyReluGrad QuantizeAndDequantizeV4Grad ReciprocalGrad Relu6Grad ReluGrad "
    "RsqrtGrad SeluGrad SigmoidGrad SoftplusGrad SoftsignGrad SqrtGrad TanhGrad"
)
_BY_IMAGE = names(
    "AdjustContrastv2 AdjustHue AdjustSaturation AvgPool3D AvgPool3DGrad AvgPoolGrad "
    "BatchToSpaceND CombinedNonMaxSuppression Conv Conv2DBackpropInput Conv2DBackpropInputV2 "
    "Conv3DBackpropInput Conv3DBackpropInputV2 DepthToSpace "
    "DepthwiseConv2dNativeBackpropInput Dilation2D DrawBoundingBoxes DrawBoundingBoxesV2 "
    "ExtractGlimpse ExtractGlimpseV2 ExtractImagePatches ExtractVolumePatches FractionalAvgPool "
    "FractionalMaxPool FusedBatchNorm FusedBatchNormV2 FusedBatchNormV3 HSVToRGB "
    "ImageProjectiveTransformV2 ImageProjectiveTransformV3 LRN MaxPool3D MaxPool3DGrad MaxPoolGrad "
    "MaxPoolGradV2 MaxPoolV2 MaxPoolWithArgmax RGBToHSV ResizeArea ResizeBicubic "
    "ResizeBicubicGrad ResizeBilinearGrad ResizeNearestNeighborGrad ScaleAndTranslate "
    "SpaceToBatchND SpaceToDepth"
)
_BY_ROW = names(
    "ApproxTopK BandedTriangularSolve BatchMatMul CholeskyGrad ConjugateTranspose Cross "
    "GRUBlockCell InTopK InTopKV2 LSTMBlockCell LowerBound MatrixBandPart MatrixDiag "
    "MatrixDiagPart MatrixDiagPartV2 MatrixDiagPartV3 MatrixDiagV2 MatrixDiagV3 MatrixSetDiag "
    "MatrixSetDiagV2 MatrixSetDiagV3 NthElement SparseMatMul TopK TridiagonalMatMul "
    "TridiagonalSolve UpperBound"
)
# Along axes that are looked at, or with time on the first axis and samples on the second.
_ALONG_AXES = names(
    "BatchMatMulV2 BatchMatMulV3 BlockLSTM BlockLSTMV2 CTCLoss CTCLossV2 Conv3D CudnnRNN "
    "CudnnRNNV2 CudnnRNNV3 Cumprod Cumsum CumulativeLogsumexp Einsum FFT FFT2D FFT3D IFFT IFFT2D "
    "IFFT3D IRFFT IRFFT2D IRFFT3D MatMul RFFT RFFT2D RFFT3D ReverseSequence ReverseV2 Roll"
)
_BY_PLACE = names(
    "BroadcastArgs Fill Gather GatherV2 MirrorPad MirrorPadGrad OneHot Pad PadV2 "
    "PlaceholderWithDefault ReduceJoin ResourceGather ResourceGatherNd Slice Split SplitV "
    "StridedSliceGrad StringNGrams StringSplit StringSplitV2 Transpose UnicodeDecode "
    "UnicodeDecodeWithOffsets UnicodeEncode UnicodeTranscode"
)
_DRAWING = names(
    "Multinomial ParameterizedTruncatedNormal RandomGamma RandomGammaGrad RandomPoisson "
    "RandomPoissonV2 StatefulRandomBinomial StatelessMultinomial "
    "StatelessParameterizedTruncatedNormal StatelessRandomBinomial StatelessRandomGammaV2 "
    "StatelessRandomGammaV3 StatelessRandomPoisson"
)
# Those that put samples together have been told from those of the same type that do not.
APART_INSIDE = (_BY_ENTRY | _ALONG_AXES | _BY_PLACE | ALONG_LAST_AXIS | ELEMENTWISE | MIXING) | (
    OF_IMAGES | OF_LABELS | OF_MATRICES | REDUCTIONS | STRUCTURAL | frozenset(KEEPS)
)
APART = APART_INSIDE | _BY_IMAGE | _BY_ROW | _DRAWING
