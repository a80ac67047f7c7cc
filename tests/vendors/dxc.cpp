// Compiles HLSL files with Microsoft's compiler, as wgpu does: dxc LIBRARY FILE...
// Says which files are refused, and why; fails if one is. Needs dxcapi.h of the compiler.
#include "dxcapi.h"

#include <cstdio>
#include <dlfcn.h>
#include <fstream>
#include <sstream>
#include <string>

int main(int count, char **arguments) {
    void *library = count > 1 ? dlopen(arguments[1], RTLD_NOW) : nullptr;
    if (!library) {
        std::fprintf(stderr, "dxc: %s\n", count > 1 ? dlerror() : "say dxc LIBRARY FILE...");
        return 2;
    }
    auto create = reinterpret_cast<DxcCreateInstanceProc>(dlsym(library, "DxcCreateInstance"));
    IDxcCompiler3 *compiler = nullptr;
    if (!create || create(CLSID_DxcCompiler, __uuidof(IDxcCompiler3), reinterpret_cast<void **>(&compiler))) {
        std::fprintf(stderr, "dxc: the library makes no compiler\n");
        return 2;
    }
    // From wgpu-hal 30, dx12/shader_compilation.rs.
    LPCWSTR options[] = {L"-E", L"main", L"-T", L"cs_6_0", L"-HV", L"2018", L"-no-warnings"};
    int refused = 0;
    for (int i = 2; i < count; i++) {
        std::ifstream file(arguments[i], std::ios::binary);
        std::stringstream read;
        read << file.rdbuf();
        const std::string text = read.str();
        const DxcBuffer source{text.data(), text.size(), DXC_CP_UTF8};
        IDxcResult *result = nullptr;
        HRESULT status = file ? S_OK : E_FAIL;
        if (status == S_OK)
            status = compiler->Compile(&source, options, sizeof options / sizeof *options, nullptr, __uuidof(IDxcResult),
                                       reinterpret_cast<void **>(&result));
        if (status == S_OK)
            result->GetStatus(&status);
        if (status != S_OK) {
            IDxcBlobEncoding *said = nullptr;
            if (result)
                result->GetErrorBuffer(&said);
            std::printf("%s: %.*s\n", arguments[i], said ? static_cast<int>(said->GetBufferSize()) : 0,
                        said ? static_cast<const char *>(said->GetBufferPointer()) : "");
            refused++;
            if (said)
                said->Release();
        }
        if (result)
            result->Release();
    }
    return refused ? 1 : 0;
}
