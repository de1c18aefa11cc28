// strftime_now: Python's datetime.strftime of a time without a zone, in the C locale.
#include "text/template_eval.h"

namespace mlcpipe::chat {

namespace {

constexpr size_t kMaxChars = 256;
constexpr const char* kDays[] = {"Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"};
constexpr const char* kMonths[] = {"January", "February", "March",     "April",   "May",      "June",
                                   "July",    "August",   "September", "October", "November", "December"};

std::string Number(int number, size_t width, char pad) {
  std::string text = std::to_string(number);
  bool pads = pad != '-' && text.size() < width;
  return pads ? std::string(width - text.size(), pad) + text : text;
}

std::string Directive(char letter, char pad, const std::tm& now) {
  std::string day = kDays[static_cast<unsigned>(now.tm_wday) % 7];
  std::string month = kMonths[static_cast<unsigned>(now.tm_mon) % 12];
  int hour = now.tm_hour % 12 ? now.tm_hour % 12 : 12, year = now.tm_year + 1900;
  switch (letter) {
    case 'a':
      return day.substr(0, 3);
    case 'A':
      return day;
    case 'b':
      return month.substr(0, 3);
    case 'B':
      return month;
    case 'd':
      return Number(now.tm_mday, 2, pad);
    case 'e':
      return Number(now.tm_mday, 2, ' ');
    case 'H':
      return Number(now.tm_hour, 2, pad);
    case 'I':
      return Number(hour, 2, pad);
    case 'j':
      return Number(now.tm_yday + 1, 3, pad);
    case 'm':
      return Number(now.tm_mon + 1, 2, pad);
    case 'M':
      return Number(now.tm_min, 2, pad);
    case 'p':
      return now.tm_hour < 12 ? "AM" : "PM";
    case 'S':
      return Number(now.tm_sec, 2, pad);
    case 'y':
      return Number(year % 100, 2, pad);
    case 'Y':
      return std::to_string(year);
    case '%':
      return "%";
    default:
      Stop(std::string("strftime_now with %") + letter);
  }
}

}  // namespace

std::string FormatTime(std::string_view format, const std::tm& now) {
  if (CountChars(format) > kMaxChars) Stop("a date format over " + std::to_string(kMaxChars) + " characters");
  std::string out;
  for (size_t at = 0; at < format.size(); ++at) {
    if (format[at] != '%') {
      out += format[at];
      continue;
    }
    char pad = at + 1 < format.size() && format[at + 1] == '-' ? format[++at] : '0';
    if (++at >= format.size()) Stop("strftime_now with % at the end");
    switch (format[at]) {
      case 'F':
        out += FormatTime("%Y-%m-%d", now);
        break;
      case 'T':
        out += FormatTime("%H:%M:%S", now);
        break;
      case 'Z':
      case 'z':
        break;
      default:
        out += Directive(format[at], pad, now);
    }
  }
  return out;
}

}  // namespace mlcpipe::chat
