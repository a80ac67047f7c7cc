// A stand-in for bcryptprimitives.dll, for tests under wine 8 only. Windows has the real one; nothing of this is shipped.
//
// Wine 8 lacks three things that the program (that is: Rust's standard library and quinn-udp) needs:
//   - bcryptprimitives.dll with ProcessPrng, from which the standard library takes random bytes;
//   - getsockopt(IPV6_V6ONLY) of an IPv4 socket: Windows answers 1, wine fails with WSAEINVAL or WSAENOPROTOOPT;
//   - setsockopt(IP_RECVECN, IPV6_RECVECN): marks of congestion on packets that arrive. Without them a connection works, and
//     does not see the marks.
// This DLL is loaded with the program, as an import of it. It has ProcessPrng, and points the program's imports of getsockopt
// and setsockopt to functions that answer for wine where wine fails. All else goes to wine's own functions.
#include <winsock2.h>
#include <ws2tcpip.h>
#include <string.h>

BOOLEAN NTAPI SystemFunction036(void *buffer, ULONG bytes); // RtlGenRandom

__declspec(dllexport) BOOL WINAPI ProcessPrng(BYTE *buffer, SIZE_T bytes) {
    while (bytes > 0) {
        ULONG part = bytes > 1 << 20 ? 1 << 20 : (ULONG)bytes;
        if (!SystemFunction036(buffer, part)) return FALSE;
        buffer += part;
        bytes -= part;
    }
    return TRUE;
}

enum { OF_IP_RECVECN = 50, OF_IPV6_RECVECN = 50 }; // ws2ipdef.h of Windows; mingw's headers do not have them

typedef int(WINAPI *GetSockOpt)(SOCKET, int, int, char *, int *);
typedef int(WINAPI *SetSockOpt)(SOCKET, int, int, const char *, int);
static GetSockOpt wine_getsockopt;
static SetSockOpt wine_setsockopt;

static int WINAPI our_getsockopt(SOCKET socket, int level, int name, char *value, int *bytes) {
    int room = bytes ? *bytes : 0; // wine changes it where it fails
    int result = wine_getsockopt(socket, level, name, value, bytes);
    if (result == 0 || level != IPPROTO_IPV6 || name != IPV6_V6ONLY || room < (int)sizeof(DWORD)) return result;
    DWORD only = 1;
    memcpy(value, &only, sizeof only);
    *bytes = sizeof only;
    WSASetLastError(0);
    return 0;
}

static int WINAPI our_setsockopt(SOCKET socket, int level, int name, const char *value, int bytes) {
    int result = wine_setsockopt(socket, level, name, value, bytes);
    int marks = (level == IPPROTO_IP && name == OF_IP_RECVECN) || (level == IPPROTO_IPV6 && name == OF_IPV6_RECVECN);
    if (result == 0 || !marks) return result;
    WSASetLastError(0);
    return 0;
}

// Points the program's import of `name` to `ours`, and returns what it pointed to.
static void *redirect(const char *name, void *ours) {
    BYTE *base = (BYTE *)GetModuleHandleA(NULL);
    IMAGE_NT_HEADERS *headers = (IMAGE_NT_HEADERS *)(base + ((IMAGE_DOS_HEADER *)base)->e_lfanew);
    IMAGE_DATA_DIRECTORY imports = headers->OptionalHeader.DataDirectory[IMAGE_DIRECTORY_ENTRY_IMPORT];
    void *before = NULL;
    if (imports.VirtualAddress == 0) return NULL;
    for (IMAGE_IMPORT_DESCRIPTOR *library = (IMAGE_IMPORT_DESCRIPTOR *)(base + imports.VirtualAddress); library->Name; library++) {
        if (lstrcmpiA((char *)base + library->Name, "ws2_32.dll") != 0 || !library->OriginalFirstThunk) continue;
        IMAGE_THUNK_DATA *names = (IMAGE_THUNK_DATA *)(base + library->OriginalFirstThunk);
        IMAGE_THUNK_DATA *places = (IMAGE_THUNK_DATA *)(base + library->FirstThunk);
        for (; names->u1.AddressOfData; names++, places++) {
            if (IMAGE_SNAP_BY_ORDINAL(names->u1.Ordinal)) continue;
            IMAGE_IMPORT_BY_NAME *entry = (IMAGE_IMPORT_BY_NAME *)(base + names->u1.AddressOfData);
            if (strcmp((char *)entry->Name, name) != 0) continue;
            DWORD protection;
            if (!VirtualProtect(&places->u1.Function, sizeof(void *), PAGE_READWRITE, &protection)) continue;
            before = (void *)places->u1.Function;
            places->u1.Function = (ULONGLONG)ours;
            VirtualProtect(&places->u1.Function, sizeof(void *), protection, &protection);
        }
    }
    return before;
}

// The imports of the program are bound before the start functions of its libraries run.
BOOL WINAPI DllMain(HINSTANCE library, DWORD reason, void *reserved) {
    (void)library, (void)reserved;
    if (reason != DLL_PROCESS_ATTACH) return TRUE;
    wine_getsockopt = (GetSockOpt)redirect("getsockopt", our_getsockopt);
    wine_setsockopt = (SetSockOpt)redirect("setsockopt", our_setsockopt);
    return TRUE;
}
