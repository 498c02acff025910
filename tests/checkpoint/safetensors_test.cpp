#include "checkpoint/safetensors.h"

#include "checkpoint/testing.h"

namespace plumb {
namespace {
using namespace testing_checkpoint;

// A file with any header text and `bytes` bytes of data; the format is written out here a second time on purpose.
void write_raw(const std::string& path, const std::string& header, size_t bytes, uint64_t length_field = 0) {
  const uint64_t length = length_field ? length_field : header.size();
  std::string text(8, '\0');
  for (int i = 0; i < 8; ++i) text[i] = static_cast<char>(length >> (8 * i) & 255);
  text += header;
  for (size_t i = 0; i < bytes; ++i) text += static_cast<char>(i);
  write_text(path, text);
}

TEST(Safetensors, ReadsAHandMadeFile) {
  TempFolder f;
  write_raw(
      f / "a.safetensors",
      R"({"__metadata__":{"format":"pt"},"b":{"dtype":"I8","shape":[3],"data_offsets":[8,11]},)"
      R"("a":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]},"s":{"dtype":"U8","shape":[],"data_offsets":[11,12]},)"
      R"("e":{"dtype":"BF16","shape":[0,5],"data_offsets":[12,12]}})",
      12);
  const Safetensors s = Safetensors::open(f / "a.safetensors");
  EXPECT_EQ(s.metadata().at("format"), "pt");
  ASSERT_EQ(s.tensors().size(), 4u);
  EXPECT_EQ(s.tensors()[0].name, "a");
  const Tensor b = s.tensor("b");
  EXPECT_EQ(b.shape(), (Shape{3}));
  EXPECT_EQ(b.ptr<int8_t>()[2], 10);
  uint32_t second;
  std::memcpy(&second, s.tensor("a").f32() + 1, 4);
  EXPECT_EQ(second, 0x07060504u);
  EXPECT_EQ(s.tensor("s").numel(), 1);
  EXPECT_EQ(s.tensor("e").shape(), (Shape{0, 5}));
  EXPECT_EQ(s.find("c"), nullptr);
  expect_error([&] { s.tensor("c"); }, {"a.safetensors: c", "missing"});
}

TEST(Safetensors, MisalignedTensorIsCopiedAndAlignedOneIsNot) {
  TempFolder f;
  std::string header = R"({"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                       R"("y":{"dtype":"F32","shape":[1],"data_offsets":[1,5]}})";
  while (header.size() % 8 != 0) header += ' ';
  write_raw(f / "a.safetensors", header, 5);
  const Safetensors s = Safetensors::open(f / "a.safetensors");
  EXPECT_EQ(reinterpret_cast<uintptr_t>(s.tensor("y").f32()) % 4, 0u);
  const Tensor y1 = s.tensor("y"), y2 = s.tensor("y");
  EXPECT_NE(y1.raw(), y2.raw());                        // copies
  EXPECT_EQ(s.tensor("x").raw(), s.tensor("x").raw());  // the mapping
  uint32_t y;
  std::memcpy(&y, s.tensor("y").f32(), 4);
  EXPECT_EQ(y, 0x04030201u);
}

TEST(Safetensors, DamagedHeadersAreRefusedWithFileAndTensor) {
  TempFolder f;
  const std::string path = f / "a.safetensors";
  const auto bad = [&](const std::string& header, size_t bytes, std::vector<std::string> parts, uint64_t length = 0) {
    write_raw(path, header, bytes, length);
    parts.push_back(path);
    expect_error([&] { Safetensors::open(path); }, parts);
  };
  const std::string x = R"("x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]})";
  bad("{" + x + "}", 7, {"x", "truncated"});
  bad("{" + x + "}", 9, {"1 bytes follow"});
  bad("{" + x + "}", 8, {"header", "truncated"}, 1000);
  bad("{" + x + "}", 8, {"limit"}, uint64_t{1} << 40);
  bad("{" + x + "," + x + "}", 8, {"x", "twice"});
  bad("{" + x + R"(,"y":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})", 8, {"y", "overlaps", "x"});
  bad("{" + x + R"(,"y":{"dtype":"F32","shape":[1],"data_offsets":[12,16]}})", 16, {"y", "gap of 4"});
  bad(R"({"x":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}})", 8, {"x", "F32 [3] takes 12 bytes", "0..8"});
  bad(R"({"x":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}})", 8, {"x", "8..0"});
  bad(R"({"x":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}})", 8, {"x", "-2"});
  bad(R"({"x":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,8]}})", 8, {"x", "too large"});
  bad(R"({"x":{"dtype":"F7","shape":[2],"data_offsets":[0,8]}})", 8, {"x", "F7"});
  bad(R"({"x":{"dtype":"F32","shape":[2]}})", 8, {"x", "data_offsets"});
  bad(R"({"x":3})", 8, {"x"});
  bad("[1]", 0, {"not a JSON object"});
  bad("{\"x\":", 0, {"not valid JSON"});
  write_text(path, "abc");
  expect_error([&] { Safetensors::open(path); }, {path, "too short"});
}

TEST(Safetensors, WriterAndShardedWriterRoundTrip) {
  TempFolder f;
  Tensors all;
  for (const auto& [name, type, size] : {std::tuple{"odd", DType::u8, 3},
                                         {"wide", DType::f32, 5},
                                         {"half", DType::bf16, 7},
                                         {"none", DType::f32, 0},
                                         {"long", DType::i64, 2}})
    all.emplace_back(name, random_tensor({name, type, {size}}, 3));
  write_safetensors(f / "one.safetensors", all, {{"a \"quoted\" key", "b"}});
  const Safetensors one = Safetensors::open(f / "one.safetensors");
  EXPECT_EQ(one.metadata().at("a \"quoted\" key"), "b");

  std::vector<TensorSpec> specs;
  for (const auto& [name, t] : all) specs.push_back({name, t.dtype(), t.shape()});
  ShardedWriter writer(f.path(), specs, 24);
  for (const TensorSpec& s : writer.specs())
    for (const auto& [name, t] : all)
      if (name == s.name) writer.append(t);
  writer.commit();
  const Safetensors shards = Safetensors::open(f.path());
  EXPECT_EQ(shards.file_count(), 3u);  // 3 + 20, 14, 16 bytes
  for (const auto& [name, t] : all) {
    EXPECT_TRUE(same(one.tensor(name), t)) << name;
    EXPECT_TRUE(same(shards.tensor(name), t)) << name;
    EXPECT_TRUE(t.numel() == 0 || one.tensor(name).raw() == one.tensor(name).raw()) << name << " is not aligned";
  }
}

TEST(Safetensors, IncompleteFileIsNeverVisible) {
  TempFolder f;
  EXPECT_THROW(
      {
        SafetensorsWriter w(f / "a.safetensors", {{"x", DType::f32, {4}}});
        w.append(Tensor::zeros({2}));
        w.commit();
      },
      Error);
  EXPECT_EQ(f.count(), 0);
}

TEST(Safetensors, IndexAndShardsMustAgree) {
  TempFolder f;
  const Tensor t = Tensor::zeros({2});
  write_safetensors(f / "s1.safetensors", {{"a", t}, {"b", t}});
  const std::string index = f / "model.safetensors.index.json";
  const auto open = [&] { Safetensors::open(f.path()); };
  write_text(index, R"({"weight_map":{"a":"s1.safetensors","b":"s1.safetensors"}})");
  EXPECT_EQ(Safetensors::open(f.path()).tensors().size(), 2u);
  write_text(index, R"({"weight_map":{"a":"s1.safetensors","b":"s2.safetensors"}})");
  expect_error(open, {"s1.safetensors: b", "not listed"});
  write_text(index, R"({"weight_map":{"a":"s1.safetensors","b":"s1.safetensors","c":"s2.safetensors"}})");
  expect_error(open, {"s2.safetensors", "missing", "download the missing shard"});
  write_text(index, R"({"weight_map":{"a":"s1.safetensors","b":"s1.safetensors","c":"s1.safetensors"}})");
  expect_error(open, {"s1.safetensors: c", "not in the file"});
  write_text(index, R"({"weight_map":{"a":"../s1.safetensors"}})");
  expect_error(open, {"../s1.safetensors", "not the name of a file in this folder"});
  write_text(index, R"({"weights":{}})");
  expect_error(open, {"weight_map"});
}

}  // namespace
}  // namespace plumb
