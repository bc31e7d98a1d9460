// Embeddings of 16-bit wav files by an exported model; of two files, their cosine.
//
//   g++ -std=c++17 -O2 embed.cpp -I ONNXRUNTIME/include -L ONNXRUNTIME/lib -lonnxruntime -o embed
//   ./embed model.onnx a.wav [b.wav]
//
// ONNXRUNTIME is an unpacked release of onnxruntime; with a distribution's package leave out -L and
// write -I /usr/include/onnxruntime. Files are mono and have the model's sample rate.
#include <onnxruntime_cxx_api.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

// A number of the wav format, which is little-endian.
uint32_t number(const std::string& bytes, size_t place, int size) {
  uint32_t value = 0;
  for (int i = size - 1; i >= 0; --i) value = value << 8 | static_cast<uint8_t>(bytes.at(place + i));
  return value;
}

// Samples in [-1, 1) of a mono 16-bit wav file.
std::vector<float> read_wave(const std::string& path, int64_t sample_rate) {
  std::ifstream file(path, std::ios::binary);
  const std::string bytes{std::istreambuf_iterator<char>(file), {}};
  if (bytes.compare(0, 4, "RIFF") != 0) throw std::runtime_error(path + ": is no wav file");
  bool is_fit = false;
  for (size_t place = 12; place + 8 <= bytes.size();) {
    const std::string name = bytes.substr(place, 4);
    const size_t size = number(bytes, place + 4, 4), body = place + 8;
    if (name == "fmt ") {
      is_fit = number(bytes, body, 2) == 1 && number(bytes, body + 2, 2) == 1 &&
               number(bytes, body + 4, 4) == sample_rate && number(bytes, body + 14, 2) == 16;
    } else if (name == "data" && is_fit) {
      std::vector<float> wave(std::min(size, bytes.size() - body) / 2);
      for (size_t i = 0; i < wave.size(); ++i)
        wave[i] = static_cast<int16_t>(number(bytes, body + 2 * i, 2)) / 32768.0f;
      return wave;
    }
    place = body + size + size % 2;
  }
  throw std::runtime_error(path + ": must be mono, 16 bit, " + std::to_string(sample_rate) + " Hz");
}

class Model {
 public:
  explicit Model(const char* path) : session_(env_, path, Ort::SessionOptions{}) {
    sample_rate = std::stoll(fact("sample_rate"));
    min_samples_ = std::stoll(fact("min_samples"));
    max_samples_ = std::stoll(fact("max_samples"));
    if (!fact("vad").empty())
      throw std::runtime_error("the model leaves out silence, which this example cannot");
  }

  // Of any length above 0: repeated if too short, the mean of equal windows if too long.
  std::vector<float> embed(std::vector<float> wave) {
    if (wave.empty()) throw std::runtime_error("a file has no samples");
    const size_t given = wave.size();
    for (size_t i = given; i < static_cast<size_t>(min_samples_); ++i)
      wave.push_back(wave[i % given]);
    const int64_t total = wave.size(), count = (total + max_samples_ - 1) / max_samples_;
    const int64_t length = total / count, rest = total % count;
    std::vector<float> mean;
    for (int64_t i = 0; i < count; ++i) {
      const auto window = run(wave.data() + i * length + std::min(i, rest), length);
      mean.resize(window.size());
      for (size_t d = 0; d < mean.size(); ++d) mean[d] += window[d] / count;
    }
    return mean;
  }

  int64_t sample_rate;

 private:
  // Empty where the model does not say it; not so of the three numbers.
  std::string fact(const char* name) {
    Ort::AllocatorWithDefaultOptions allocator;
    const auto text = session_.GetModelMetadata().LookupCustomMetadataMapAllocated(name, allocator);
    return text ? text.get() : "";
  }

  std::vector<float> run(float* samples, int64_t length) {
    const auto memory = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
    const int64_t shape[] = {1, length};
    const auto wave = Ort::Value::CreateTensor<float>(memory, samples, length, shape, 2);
    const char *input = "wave", *output = "embedding";
    const auto found = session_.Run(Ort::RunOptions{}, &input, &wave, 1, &output, 1);
    const float* values = found[0].GetTensorData<float>();
    return {values, values + found[0].GetTensorTypeAndShapeInfo().GetElementCount()};
  }

  Ort::Env env_;
  Ort::Session session_;
  int64_t min_samples_, max_samples_;
};

int main(int argc, char** argv) try {
  if (argc < 3) throw std::runtime_error("usage: embed model.onnx a.wav [b.wav]");
  Model model(argv[1]);
  std::vector<std::vector<float>> embeddings;
  for (int i = 2; i < argc; ++i)
    embeddings.push_back(model.embed(read_wave(argv[i], model.sample_rate)));
  if (embeddings.size() == 2) {
    double ab = 0, aa = 0, bb = 0;
    for (size_t d = 0; d < embeddings[0].size(); ++d) {
      const double a = embeddings[0][d], b = embeddings[1][d];
      ab += a * b, aa += a * a, bb += b * b;
    }
    std::printf("%.6f\n", ab / std::sqrt(aa * bb));
    return 0;
  }
  for (const auto& embedding : embeddings)
    for (size_t d = 0; d < embedding.size(); ++d)
      std::printf("%.7g%s", embedding[d], d + 1 < embedding.size() ? " " : "\n");
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
