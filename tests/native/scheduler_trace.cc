// Plans of the scheduler for a trace of requests (tests/native/test_scheduler.py), a line of JSON for each turn.
#include <cstdio>
#include <iostream>

#include "error.h"
#include "serving/message_borders.h"
#include "serving/scheduler.h"

using namespace mlcpipe::serving;

namespace {

template <typename Number = int64_t>
Number Read() {
  Number number{};
  std::cin >> number;
  return number;
}

std::vector<int32_t> ReadList() {
  std::vector<int32_t> list(Read<size_t>());
  for (int32_t& number : list) number = Read<int32_t>();
  return list;
}

Request ReadRequest(double now) {
  Request request;
  request.tokens = ReadList();
  request.max_tokens = Read();
  for (int32_t id : ReadList()) request.stop_ids.insert(id);
  request.priority = Read<int>();
  if (const auto deadline_s = Read<double>(); deadline_s >= 0) request.deadline_s = deadline_s;
  request.cache_salt = Read<std::string>();
  request.keep = Read();
  request.deterministic = Read();
  request.drafts = Read();
  const std::vector<int32_t> control = ReadList();
  request.borders = PageBorders(static_cast<int64_t>(request.tokens.size()), {control.begin(), control.end()});
  request.arrival = now;
  return request;
}

template <typename List, typename Write>
void PrintList(const List& list, Write write) {
  std::cout << "[";
  for (size_t i = 0; i < list.size(); ++i) {
    if (i) std::cout << ",";
    write(list[i]);
  }
  std::cout << "]";
}

void PrintNumbers(const std::vector<int32_t>& list) {
  PrintList(list, [](int32_t number) { std::cout << number; });
}

void PrintEvents(const char* name, const std::vector<Event>& events) {
  const char* const kEnds[] = {"\"stop\"", "\"length\"", "\"cancelled\"", "\"timeout\"", "\"error\""};
  std::cout << ",\"" << name << "\":";
  PrintList(events, [&](const Event& one) {
    std::cout << "[" << one.sequence->id << ",[";
    for (size_t at = 0; at < one.tokens.size(); ++at) std::cout << (at ? "," : "") << one.tokens[at];
    std::cout << "]," << (one.end ? kEnds[static_cast<int>(*one.end)] : "null") << "]";
  });
}

// Pages of each sequence, and slots where there are any.
void PrintUnits(const Step& step, bool slots) {
  std::vector<SequencePointer> sequences;
  for (const DecodeRows& one : step.decode) sequences.push_back(one.sequence);
  for (const PrefillRows& one : step.prefill) sequences.push_back(one.sequence);
  std::cout << ",\"tables\":";
  PrintList(sequences, [](const SequencePointer& one) { PrintList(one->tables, PrintNumbers); });
  if (!slots) return;
  std::cout << ",\"slots\":";
  PrintList(sequences, [](const SequencePointer& one) { PrintNumbers({one->slot, one->next_slot}); });
}

void PrintPlan(const Step* step, bool slots) {
  std::cout << ",\"plan\":";
  if (!step) {
    std::cout << "null";
    return;
  }
  std::cout << "{\"decode\":";
  PrintList(step->decode, [](const DecodeRows& one) {
    const FewTokens& draft = one.sequence->draft;
    const auto begin = one.sequence->tokens.begin() + one.sequence->computed;
    std::vector<int32_t> tokens(begin, begin + one.rows - static_cast<int64_t>(draft.size()));
    tokens.insert(tokens.end(), draft.begin(), draft.end());
    std::cout << "[" << one.sequence->id << ",";
    PrintNumbers(tokens);
    std::cout << "," << one.logits << "]";
  });
  std::cout << ",\"prefill\":";
  PrintList(step->prefill, [](const PrefillRows& one) {
    std::cout << "[" << one.sequence->id << "," << one.begin << "," << one.rows << ",";
    PrintList(one.drawing, [](const SequencePointer& each) { std::cout << each->id; });
    std::cout << "]";
  });
  std::cout << ",\"copies\":";
  PrintList(step->copies, [](const PageCopy& one) {
    std::cout << "[" << one.source << "," << one.target << "," << one.group << "]";
  });
  PrintUnits(*step, slots);
  std::cout << "}";
}

std::vector<PageGroup> ReadGroups() {
  std::vector<PageGroup> groups(Read<size_t>());
  for (PageGroup& group : groups) {
    group.pages = Read();
    group.window = Read();
  }
  return groups;
}

Limits ReadLimits() {
  Limits limits;
  limits.context = Read();
  limits.prefill_chunk = Read();
  limits.sequences = Read();
  limits.queue = Read();
  limits.decode_rows = Read();
  limits.step_s = Read<double>();
  if (const int64_t above = Read(); above >= 0) limits.recompute_above = above;
  return limits;
}

void Run() {
  const auto groups = ReadGroups();
  const int64_t slots = Read();
  const Limits limits = ReadLimits();
  Costs costs;
  for (double& cost : costs) cost = Read<double>();
  Scheduler scheduler(groups, slots, limits, std::nullopt, CostModel(costs, false));
  std::vector<SequencePointer> sequences;
  for (double now; std::cin >> now;) {
    for (auto count = Read(); count; --count) sequences.push_back(scheduler.Submit(ReadRequest(now)));
    bool cancelled = true;
    for (auto count = Read(); count; --count) {
      const SequencePointer& sequence = sequences.at(Read<size_t>());
      cancelled &= scheduler.Cancel(sequence, static_cast<End>(Read<int>()));
    }
    std::cout << "{\"cancelled\":" << cancelled;
    PrintEvents("expired", scheduler.Expire(now));
    const Step* const step = scheduler.Plan(now);
    PrintPlan(step, slots != 0);
    const std::vector<int32_t> drawn = ReadList();
    const auto settled = Read<double>();
    if (step) PrintEvents("events", scheduler.Settle(*step, drawn, settled));
    std::cout << ",\"has_work\":" << scheduler.has_work() << "}\n";
  }
  PrintList(sequences, [](const SequencePointer& one) {
    std::cout << "[\"" << (one->miss.reason ? one->miss.reason : "") << "\"," << one->miss.token << "," << one->drafted << ","
              << one->accepted << "]";
  });
}

// Loads and the seconds that they took: prints what the cost model then expects.
void Learn() {
  CostModel cost;
  Load load;
  while (std::cin >> load.decode >> load.decode_keys >> load.prefill >> load.prefill_keys) {
    cost.Observe(load, Read<double>());
    std::printf("[%.17g,%lld,%lld]\n", cost.Seconds(load),
                static_cast<long long>(cost.PromptRows({load.decode, load.decode_keys, 0, 0}, 0.4, 100, 512)),
                static_cast<long long>(cost.DecodeRowsFor(200)));
    const std::vector<double> gains{0.9, 0.8, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3};
    const Load answers{load.decode + 1, load.decode_keys, 0, 0};
    const bool may = cost.MayDraft(answers, 8);
    std::printf("[%d,%lld]\n", may, static_cast<long long>(cost.DraftRows(answers, gains)));
  }
}

}  // namespace

// Of a trace, or with an argument of a cost model.
int main(int count, char**) {
  try {
    count > 1 ? Learn() : Run();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
