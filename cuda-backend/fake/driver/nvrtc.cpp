// The functions of `libnvrtc.so` that the CUDA backend uses. The fake driver accepts its output as a cubin or PTX, unless it is of
// a toolkit that is newer than the driver. `nvrtc=12060` in KYKLOS_FAKE_CUDA makes it NVRTC 12.6; else it is 13.0.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>

#define API extern "C" __attribute__((visibility("default"))) int

struct Program {
    std::string source, log, image;
    std::map<std::string, std::string> headers;
};

static const int SUCCESS = 0, COMPILATION = 6;
static const int ARCHITECTURES[] = {75, 80, 86, 89, 90, 100, 120};

static int toolkit() {
    const char *settings = std::getenv("KYKLOS_FAKE_CUDA"), *found = settings ? std::strstr(settings, "nvrtc=") : nullptr;
    return found ? std::atoi(found + 6) : 13000;
}

API nvrtcVersion(int *major, int *minor) {
    *major = toolkit() / 1000;
    *minor = toolkit() % 1000 / 10;
    return SUCCESS;
}

extern "C" __attribute__((visibility("default"))) const char *nvrtcGetErrorString(int code) {
    return code == COMPILATION ? "NVRTC_ERROR_COMPILATION" : "NVRTC_ERROR_INVALID_INPUT";
}

API nvrtcGetNumSupportedArchs(int *count) {
    *count = sizeof ARCHITECTURES / sizeof *ARCHITECTURES;
    return SUCCESS;
}

API nvrtcGetSupportedArchs(int *all) {
    std::memcpy(all, ARCHITECTURES, sizeof ARCHITECTURES);
    return SUCCESS;
}

API nvrtcCreateProgram(Program **program, const char *source, const char *, int count, const char *const *headers,
                       const char *const *names) {
    *program = new Program{source, "", "", {}};
    for (int i = 0; i < count; i++) (*program)->headers[names[i]] = headers[i];
    return SUCCESS;
}

API nvrtcDestroyProgram(Program **program) {
    delete *program;
    *program = nullptr;
    return SUCCESS;
}

// Every included header must be given, as for the real NVRTC.
static void look_for_headers(Program &program, const std::string &text) {
    const std::string include = "#include \"";
    for (size_t at = text.find(include); at != std::string::npos; at = text.find(include, at + 1)) {
        const size_t from = at + include.size();
        const std::string name = text.substr(from, text.find('"', from) - from);
        auto header = program.headers.find(name);
        if (header == program.headers.end()) {
            program.log += "cannot open source file \"" + name + "\"\n";
        } else if (header->second.find("#pragma once") != std::string::npos && !header->second.empty()) {
            const std::string once = std::move(header->second);
            header->second.clear();
            look_for_headers(program, once);
        }
    }
}

API nvrtcCompileProgram(Program *program, int count, const char *const *options) {
    std::string architecture;
    for (int i = 0; i < count; i++) {
        const std::string option = options[i], name = "--gpu-architecture=";
        if (option.compare(0, name.size(), name) == 0) architecture = option.substr(name.size());
    }
    look_for_headers(*program, program->source);
    if (std::getenv("KYKLOS_FAKE_NVRTC_FAILS")) program->log += "kernels.cu(1): error: told to fail\n";
    if (!program->log.empty() || architecture.empty()) return COMPILATION;
    std::fprintf(stderr, "fake nvrtc: compiled for %s\n", architecture.c_str());
    const bool cubin = architecture.compare(0, 3, "sm_") == 0;
    program->image = (cubin ? "\x7f" "ELF by " : ".version by ") + std::to_string(toolkit()) + " for " + architecture;
    return SUCCESS;
}

API nvrtcGetProgramLogSize(Program *program, size_t *bytes) {
    *bytes = program->log.size() + 1;
    return SUCCESS;
}

API nvrtcGetProgramLog(Program *program, char *log) {
    std::memcpy(log, program->log.c_str(), program->log.size() + 1);
    return SUCCESS;
}

API nvrtcGetCUBINSize(Program *program, size_t *bytes) {
    *bytes = program->image.size();
    return SUCCESS;
}

API nvrtcGetCUBIN(Program *program, char *image) {
    std::memcpy(image, program->image.data(), program->image.size());
    return SUCCESS;
}

API nvrtcGetPTXSize(Program *program, size_t *bytes) {
    *bytes = program->image.size() + 1;
    return SUCCESS;
}

API nvrtcGetPTX(Program *program, char *image) {
    std::memcpy(image, program->image.c_str(), program->image.size() + 1);
    return SUCCESS;
}
