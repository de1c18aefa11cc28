// One request of the C API: its prompt as tokens, and its tokens as text.
#ifndef MLCPIPE_RUNTIME_ANSWER_H_
#define MLCPIPE_RUNTIME_ANSWER_H_

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "c_structs.h"
#include "text/harmony.h"
#include "text/text_stream.h"

namespace mlcpipe {

class Answer {
 public:
  // The memory behind `given` is read before the answer begins, or by `Submit`.
  Answer(Engine* engine, const mlcpipe_request& given) : engine_(engine), given_(given) {}

  // As `Engine::Submit`; the engine keeps `answer` until its end, which `on_end` learns of after the last text.
  template <typename OnEnd>
  static uint64_t Submit(const std::shared_ptr<Answer>& answer, OnEnd on_end) {
    return answer->engine_->Submit(
        answer->MakeRequest(), [answer](int32_t token) { return answer->OnToken(token); },
        [answer, on_end](const Statistics& statistics, std::optional<Finish> finish, const Error* error) {
          if (finish && answer->stream_) answer->ShowRest();
          on_end(statistics, finish, error);
        });
  }

  Finish Generate() {
    const Finish finish =
        engine_->Generate([this] { return MakeRequest(); }, [this](int32_t token) { return OnToken(token); },
                          &statistics_);
    if (stream_) ShowRest();
    return finish;
  }

  const Statistics& statistics() const { return statistics_; }

 private:
  Engine* engine_;
  const mlcpipe_request given_;
  std::optional<TextStream> stream_;
  std::optional<harmony::Text> harmony_;  // reads what `stream_` writes
  Statistics statistics_;

  Request MakeRequest() {
    const auto stop_ids = Ids(given_.stop_ids, given_.stop_count, "stop_ids");
    if (given_.messages.bytes && engine_->text().harmony()) harmony_.emplace();
    if (!given_.prompt_count || given_.on_text || given_.stops_count) {
      stream_.emplace(engine_->text().tokenizer(), Stream());
    }
    return {Prompt(), given_.max_tokens, {stop_ids.begin(), stop_ids.end()}, SamplingOf(given_.sampling),
            given_.deterministic != 0, given_.priority, given_.timeout_s};
  }

  std::vector<int32_t> Prompt() const {
    if ((given_.prompt_count != 0) + (given_.text.bytes != 0) + (given_.messages.bytes != 0) > 1) {
      throw Error(Code::kUsage, "the prompt").Expected("one of prompt, text and messages");
    }
    std::vector<uint32_t> ids;
    if (given_.text.bytes) ids = engine_->text().tokenizer().Encode(ViewOf(given_.text), true);
    if (given_.messages.bytes) ids = engine_->text().EncodeChat(ViewOf(given_.messages), ViewOf(given_.variables));
    if (ids.empty()) return Ids(given_.prompt, given_.prompt_count, "prompt");
    return {ids.begin(), ids.end()};
  }

  StreamOptions Stream() const {
    StreamOptions options;
    for (size_t i = 0; i < given_.stops_count; ++i) {
      options.stops.emplace_back(ViewOf(Required(given_.stops, "stops")[i]));
    }
    if (!given_.prompt_count && !given_.ignore_end) options.ends = engine_->text().Ends();
    options.continues = !given_.messages.bytes;
    if (harmony_) options.shown = harmony::Marks(engine_->text().tokenizer());
    return options;
  }

  Verdict OnToken(int32_t token) {
    bool wanted = !given_.on_token || !given_.on_token(given_.context, token);
    if (stream_) {
      const std::string text = stream_->Push(static_cast<uint32_t>(token));
      wanted = Show(harmony_ ? harmony_->Push(text) : text) && wanted;
    }
    if (stream_ && stream_->stopped()) return Verdict::kStop;
    return wanted ? Verdict::kGoOn : Verdict::kCancel;
  }

  void ShowRest() {
    const std::string text = stream_->Flush();
    Show(harmony_ ? harmony_->Flush(text) : text);
  }

  bool Show(const std::string& text) {
    return text.empty() || !given_.on_text || !given_.on_text(given_.context, text.data(), text.size());
  }
};

}  // namespace mlcpipe

#endif  // MLCPIPE_RUNTIME_ANSWER_H_
