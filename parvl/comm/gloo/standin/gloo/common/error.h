// Stand-in for a header of Gloo that libtorch's headers include but do not bring: what they need of it, as
// declarations. The code is inside libtorch; nothing here is constructed.
#pragma once
