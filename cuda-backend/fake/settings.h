// Settings of a fake library in an environment variable, as `name=number,…`.
#pragma once
#include <cstdlib>
#include <initializer_list>
#include <string>

namespace fake {

struct Setting {
    const char *name;
    unsigned long long *value;
};

// Reads the variable. Returns the first entry that is no setting, or an empty text.
inline std::string read_settings(const char *variable, std::initializer_list<Setting> settings) {
    const char *text = std::getenv(variable);
    std::string left = text ? text : "";
    while (!left.empty()) {
        const std::string entry = left.substr(0, left.find(','));
        left = entry.size() < left.size() ? left.substr(entry.size() + 1) : "";
        const size_t equals = entry.find('=');
        bool known = false;
        for (const Setting &setting : settings) {
            if (equals == std::string::npos || entry.substr(0, equals) != setting.name) continue;
            *setting.value = std::strtoull(entry.c_str() + equals + 1, nullptr, 10);
            known = true;
        }
        if (!known) return entry;
    }
    return "";
}

// splitmix64
inline unsigned long long chance(unsigned long long &random, unsigned long long below) {
    unsigned long long z = random += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return (z >> 33) % below;
}

}  // namespace fake
