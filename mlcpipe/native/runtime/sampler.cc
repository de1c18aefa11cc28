#include "sampler.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <sstream>

#include "random.h"
#include "tensors.h"

namespace mlcpipe {
namespace {

using tvm::runtime::Tensor;

std::string Words(double number) {
  std::ostringstream text;
  text << number;
  return text.str();
}

void CheckRange(const std::string& name, double value, double low, double high) {
  if (value >= low && value <= high) return;  // not for NaN
  throw Error(Code::kUsage, name).Expected("a number in [" + Words(low) + ", " + Words(high) + "]").Found(Words(value));
}

// Undoes what was added of a draft, after an error too: the answer may continue without it.
struct WithDraft {
  Counts* counts;
  const int32_t* draft;
  size_t added = 0;

  ~WithDraft() {
    while (added) counts->Undo(draft[--added]);
  }
};

}  // namespace

void Sampling::Check(int64_t vocab) const {
  CheckRange("temperature", temperature, 0, 100);
  if (!(top_p > 0 && top_p <= 1)) throw Error(Code::kUsage, "top_p").Expected("a number in (0, 1]").Found(Words(top_p));
  CheckRange("min_p", min_p, 0, 1);
  if (top_k < 0) throw Error(Code::kUsage, "top_k").Expected("an integer >= 0").Found(std::to_string(top_k));
  CheckRange("repetition_penalty", repetition_penalty, 0.01, 100);
  CheckRange("presence_penalty", presence_penalty, -2, 2);
  CheckRange("frequency_penalty", frequency_penalty, -2, 2);
  std::set<int64_t> seen;
  for (const auto& [token, bias] : logit_bias) {
    CheckRange("logit_bias[" + std::to_string(token) + "]", bias, -100, 100);
    if (token < 0 || token >= vocab || !seen.insert(token).second) {
      throw Error(Code::kUsage, "logit_bias names a token")
          .Expected("ids from 0 to " + std::to_string(vocab - 1) + ", each once")
          .Found(std::to_string(token));
    }
  }
}

Counts::Counts(int64_t vocab, double presence, double frequency, double repetition)
    : entry_of_(static_cast<size_t>(vocab), -1), row_(Filled<int32_t>({0}, kInt32)), strengths_(Empty({1, 3}, kFloat32)) {
  const double strengths[] = {presence, frequency, repetition};
  for (int i = 0; i < 3; ++i) Data<float>(strengths_)[i] = static_cast<float>(strengths[i]);
  Grow();
}

void Counts::Grow() {
  const int64_t room = used_ ? 2 * used_ : 256;
  const auto bytes = static_cast<size_t>(used_) * sizeof(int32_t);
  Tensor tokens = Empty({room}, kInt32), counts = Empty({room}, kInt32);
  Tensor zeros = Filled(std::vector<int32_t>(static_cast<size_t>(room), 0), kInt32);
  if (used_) {
    std::memcpy(tokens->data, tokens_->data, bytes);
    std::memcpy(counts->data, counts_->data, bytes);
  }
  tokens_ = tokens;  // after what may throw
  counts_ = counts;
  zeros_ = zeros;
  room_ = room;
}

void Counts::Add(int32_t token) {
  int32_t& entry = entry_of_[static_cast<size_t>(token)];
  if (entry < 0) {
    if (used_ == room_) Grow();
    entry = static_cast<int32_t>(used_++);
    Data<int32_t>(tokens_)[entry] = token;
    Data<int32_t>(counts_)[entry] = 0;
  }
  ++Data<int32_t>(counts_)[entry];
}

void Counts::Undo(int32_t token) {
  int32_t& entry = entry_of_[static_cast<size_t>(token)];
  if (--Data<int32_t>(counts_)[entry]) return;
  entry = -1;  // which was the last one
  --used_;
}

void Counts::Penalize(const tvm::ffi::Function& penalize, const Device& device, const Tensor& logits, size_t row) {
  if (!used_) return;
  *Data<int32_t>(row_) = static_cast<int32_t>(row);
  for (const Tensor* of : {&zeros_, &tokens_, &counts_}) SetRows(*of, used_);
  penalize(logits, device.Put(row_), device.Put(zeros_), device.Put(tokens_), device.Put(counts_),
           device.Put(strengths_));
}

Row::Row(int64_t vocab, Sampling params, const std::vector<int32_t>& prompt) : params_(std::move(params)) {
  if (params_.top_k >= vocab) params_.top_k = 0;
  if (params_.repetition_penalty != 1) {
    counts_.emplace_back(vocab, 0, 0, params_.repetition_penalty);
    for (int32_t token : prompt) counts_.back().Add(token);
  }
  if (params_.presence_penalty != 0 || params_.frequency_penalty != 0) {
    counts_.emplace_back(vocab, params_.presence_penalty, params_.frequency_penalty, 1);
  }
  std::vector<int32_t> tokens;
  std::vector<float> biases;
  for (const auto& [token, bias] : params_.logit_bias) {
    tokens.push_back(static_cast<int32_t>(token));
    biases.push_back(static_cast<float>(bias));
  }
  if (tokens.empty()) return;
  bias_rows_ = Empty({static_cast<int64_t>(tokens.size())}, kInt32);
  bias_tokens_ = Filled(tokens, kInt32);
  biases_ = Filled(biases, kFloat32);
}

void Row::Accept(int32_t token) {
  for (Counts& counts : counts_) counts.Add(token);
}

Sampler::Sampler(const Device& device, const Library& library, int64_t vocab, int64_t rows)
    : device_(device),
      sample_(library.Get("sample")),
      penalize_(library.Get("apply_penalty_inplace")),
      add_bias_(library.Get("apply_logit_bias_inplace")),
      on_device_(5, Reused(device)),
      vocab_(vocab) {
  for (int i = 0; i < 5; ++i) settings_[i] = Empty({rows}, i == 2 ? kInt32 : kFloat32);
}

const int32_t* Sampler::Draw(const Tensor& logits, const RowDraw* rows, size_t count) {
  for (size_t at = 0; at < count; ++at) {
    Put(at, rows[at]);
    if (!rows[at].row) continue;
    Row& row = *rows[at].row;
    for (Counts& counts : row.counts_) {
      WithDraft with{&counts, rows[at].draft};
      for (; with.added < rows[at].drafted; ++with.added) counts.Add(with.draft[with.added]);
      counts.Penalize(penalize_, device_, logits, at);
    }
    if (row.params_.logit_bias.empty()) continue;
    std::fill_n(Data<int32_t>(row.bias_rows_), row.bias_rows_->shape[0], static_cast<int32_t>(at));
    add_bias_(logits, device_.Put(row.bias_rows_), device_.Put(row.bias_tokens_), device_.Put(row.biases_));
  }
  const auto size = static_cast<int64_t>(count);
  if (!logits_.same_as(logits)) {
    viewed_logits_ = ViewOf(logits, {size, 1, vocab_});
    logits_ = logits;  // after what may throw
  }
  SetRows(viewed_logits_, size);
  Tensor put[5];
  for (size_t i = 0; i < 5; ++i) {
    SetRows(settings_[i], size);
    put[i] = on_device_[i].Put(settings_[i]);
  }
  const auto drawn = sample_(viewed_logits_, put[0], put[1], put[2], put[3], put[4]).cast<Tensor>();
  drawn_.resize(count);
  CopyOut(drawn, 0, drawn_.data(), count * sizeof(int32_t));
  return drawn_.data();
}

// The settings of a row; greedy ones for a row without a sequence.
void Sampler::Put(size_t at, const RowDraw& drawn) {
  Sampling greedy;
  greedy.temperature = 0;
  const Sampling& params = drawn.row ? drawn.row->params_ : greedy;
  Data<float>(settings_[0])[at] = static_cast<float>(params.temperature);
  Data<float>(settings_[1])[at] = static_cast<float>(params.top_p);
  Data<int32_t>(settings_[2])[at] = static_cast<int32_t>(params.top_k);
  Data<float>(settings_[3])[at] = static_cast<float>(params.min_p);
  Data<float>(settings_[4])[at] = params.greedy() ? 0 : Uniform(params.seed, drawn.position);
}

}  // namespace mlcpipe
