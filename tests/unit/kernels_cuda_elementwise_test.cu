// Elementwise GPU kernels against plain loops in float64, where 16 bytes go at once and where they cannot. Without a
// GPU each test skips and says so.
#include "parvl/kernels/elementwise.h"
#include "tests/unit/kernels_cuda_fixture.cuh"

namespace parvl::kernels {
namespace {

template <typename T>
struct Kind;
template <>
struct Kind<float> {
  using Acc = float;
  static constexpr Element kElement = Element::kFloat32;
  static constexpr double kBound = 1e-6;
};
template <>
struct Kind<double> {
  using Acc = double;
  static constexpr Element kElement = Element::kFloat64;
  static constexpr double kBound = 1e-14;
};
template <>
struct Kind<Bf16> {
  using Acc = float;
  static constexpr Element kElement = Element::kBFloat16;
  static constexpr double kBound = 4e-3;  // half of the last place, relative, and a little
};

double to_double(float x) { return x; }
double to_double(double x) { return x; }
double to_double(Bf16 x) { return wide(x); }

template <typename T>
std::vector<T> random_values(uint64_t seed, int64_t count) {
  Rng rng(seed);
  std::vector<T> out;
  for (int64_t i = 0; i < count; ++i) out.push_back(static_cast<T>(static_cast<float>(rng.normal() * 2)));
  return out;
}

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

template <typename T>
class ElementwiseTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!has_gpu()) GTEST_SKIP() << "no GPU on this machine";
  }
  static void check(const std::vector<T>& got, const std::vector<double>& want, const char* what) {
    ASSERT_EQ(got.size(), want.size());
    for (size_t i = 0; i < want.size(); ++i) {
      ASSERT_NEAR(to_double(got[i]), want[i], Kind<T>::kBound * std::max(1.0, std::abs(want[i])))
          << what << " at " << i;
    }
  }
};
using Types = testing::Types<float, double, Bf16>;
TYPED_TEST_SUITE(ElementwiseTest, Types);

TYPED_TEST(ElementwiseTest, QuickGelu) {
  // Beginning at `skip`, so that some do not begin at a multiple of 16 bytes.
  for (const auto& [skip, count] : {std::pair<int64_t, int64_t>{0, 4096}, {0, 1001}, {1, 4096}, {8, 8}, {3, 5}}) {
    Array<TypeParam> x(random_values<TypeParam>(1, skip + count)), y(static_cast<size_t>(skip + count));
    CUDA_OK(kCudaElementwise.quick_gelu(Kind<TypeParam>::kElement, x.get() + skip, y.get() + skip, count, nullptr));
    CUDA_OK(cudaDeviceSynchronize());
    const std::vector<TypeParam> all = y.read();
    std::vector<double> want;
    for (int64_t i = skip; i < skip + count; ++i) {
      const double v = to_double(x.host()[static_cast<size_t>(i)]);
      want.push_back(v * sigmoid(1.702 * v));
    }
    this->check({all.begin() + skip, all.end()}, want, "quick_gelu");
  }
}

// Gate and up as halves of one tensor of rows that lie `stride` apart.
TYPED_TEST(ElementwiseTest, Swiglu) {
  for (const auto& [rows, columns] : {std::pair<int64_t, int64_t>{5, 2048}, {3, 24}, {7, 13}, {1, 1}}) {
    const int64_t stride = 2 * columns;
    Array<TypeParam> x(random_values<TypeParam>(2, rows * stride)), y(static_cast<size_t>(rows * columns));
    CUDA_OK(kCudaElementwise.swiglu(Kind<TypeParam>::kElement, x.get(), x.get() + columns, stride, y.get(), rows,
                                    columns, nullptr));
    CUDA_OK(cudaDeviceSynchronize());
    std::vector<double> want;
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < columns; ++c) {
        const double g = to_double(x.host()[static_cast<size_t>(r * stride + c)]);
        want.push_back(g * sigmoid(g) * to_double(x.host()[static_cast<size_t>(r * stride + columns + c)]));
      }
    }
    this->check(y.read(), want, "swiglu");
  }
}

// Of both gates: the derivative of silu(g) · u is sigmoid(g) · (1 + g · (1 − sigmoid(g))) · u by g, silu(g) by u; with
// 1.702 g in the place of g for the quick GELU.
TYPED_TEST(ElementwiseTest, Backward) {
  for (const auto& [skip, count] : {std::pair<int64_t, int64_t>{0, 4096}, {0, 1001}, {1, 4096}, {8, 8}, {3, 5}}) {
    const auto values = [&, skip = skip, count = count](uint64_t seed) {
      return random_values<TypeParam>(seed, skip + count);
    };
    const auto size = static_cast<size_t>(skip + count);
    Array<TypeParam> dy(values(4)), gate(values(5)), up(values(6)), dgate(size), dup(size), dx(size);
    CUDA_OK(kCudaElementwise.swiglu_backward(Kind<TypeParam>::kElement, dy.get() + skip, gate.get() + skip,
                                             up.get() + skip, dgate.get() + skip, dup.get() + skip, count, nullptr));
    CUDA_OK(kCudaElementwise.quick_gelu_backward(Kind<TypeParam>::kElement, dy.get() + skip, gate.get() + skip,
                                                 dx.get() + skip, count, nullptr));
    CUDA_OK(cudaDeviceSynchronize());
    std::vector<double> want_gate, want_up, want_x;
    for (size_t i = static_cast<size_t>(skip); i < size; ++i) {
      const double d = to_double(dy.host()[i]), g = to_double(gate.host()[i]), u = to_double(up.host()[i]);
      const double s = sigmoid(g), quick = sigmoid(1.702 * g);
      want_gate.push_back(d * u * s * (1 + g * (1 - s)));
      want_up.push_back(d * g * s);
      want_x.push_back(d * quick * (1 + 1.702 * g * (1 - quick)));
    }
    const auto from = [skip = skip](const std::vector<TypeParam>& all) {
      return std::vector<TypeParam>(all.begin() + skip, all.end());
    };
    this->check(from(dgate.read()), want_gate, "swiglu_backward's gate");
    this->check(from(dup.read()), want_up, "swiglu_backward's up");
    this->check(from(dx.read()), want_x, "quick_gelu_backward");
  }
}

// Heads of a wider row, as queries and keys lie beside values.
TYPED_TEST(ElementwiseTest, Rotary) {
  using Acc = typename Kind<TypeParam>::Acc;
  struct Shape {
    int64_t rows, heads, dim, stride;
  };
  for (const Shape& s : {Shape{33, 4, 80, 3 * 2 * 80}, {9, 2, 128, 256}, {5, 3, 6, 20}, {1, 1, 2, 2}}) {
    for (const bool inverse : {false, true}) {
      const int64_t half = s.dim / 2;
      Array<TypeParam> x(random_values<TypeParam>(3, s.rows * s.stride)),
          y(static_cast<size_t>(s.rows * s.heads * s.dim));
      std::vector<Acc> cosines, sines;
      for (int64_t i = 0; i < s.rows * half; ++i) {
        cosines.push_back(static_cast<Acc>(std::cos(0.1 * static_cast<double>(i))));
        sines.push_back(static_cast<Acc>(std::sin(0.1 * static_cast<double>(i))));
      }
      Array<Acc> cos(cosines), sin(sines);
      CUDA_OK(kCudaElementwise.rotary(Kind<TypeParam>::kElement, x.get(), s.stride, cos.get(), sin.get(), y.get(),
                                      s.rows, s.heads, s.dim, inverse, nullptr));
      CUDA_OK(cudaDeviceSynchronize());
      std::vector<double> want(static_cast<size_t>(s.rows * s.heads * s.dim));
      for (int64_t r = 0; r < s.rows; ++r) {
        for (int64_t h = 0; h < s.heads; ++h) {
          for (int64_t f = 0; f < half; ++f) {
            const double low = to_double(x.host()[static_cast<size_t>(r * s.stride + h * s.dim + f)]);
            const double high = to_double(x.host()[static_cast<size_t>(r * s.stride + h * s.dim + half + f)]);
            const double c = cosines[static_cast<size_t>(r * half + f)];
            const double t = (inverse ? -1 : 1) * static_cast<double>(sines[static_cast<size_t>(r * half + f)]);
            double* out = want.data() + (r * s.heads + h) * s.dim + f;
            out[0] = low * c - high * t;
            out[half] = high * c + low * t;
          }
        }
      }
      this->check(y.read(), want, "rotary");
    }
  }
}

}  // namespace
}  // namespace parvl::kernels
