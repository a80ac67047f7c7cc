/* A Vulkan driver that is another one without its subgroup operations.
 *
 * ONNX Runtime's fused attention gives wrong results on software drivers that offer subgroups, so the comparison hides
 * them from it. WRAPPED_DRIVER is the library that does the work; everything but one answer is passed through.
 *
 *   cc -shared -fPIC -O1 -o without_subgroups.so without_subgroups.c -ldl        (headers: libvulkan-dev)
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <vulkan/vk_icd.h>
#include <vulkan/vulkan.h>

#define EXPORT __attribute__((visibility("default")))

static PFN_vkGetPhysicalDeviceProperties2 wrapped_properties;

static void *wrapped(const char *symbol) {
    static void *library;
    if (!library) {
        const char *path = getenv("WRAPPED_DRIVER");
        library = path ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
        if (!library) {
            fprintf(stderr, "without_subgroups: WRAPPED_DRIVER: %s\n", path ? dlerror() : "not set");
            abort();
        }
    }
    return dlsym(library, symbol);
}

static VKAPI_ATTR void VKAPI_CALL properties(VkPhysicalDevice device, VkPhysicalDeviceProperties2 *answer) {
    wrapped_properties(device, answer);
    for (VkBaseOutStructure *next = answer->pNext; next; next = next->pNext) {
        if (next->sType == VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SUBGROUP_PROPERTIES)
            ((VkPhysicalDeviceSubgroupProperties *)next)->supportedOperations = VK_SUBGROUP_FEATURE_BASIC_BIT;
        if (next->sType == VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_1_PROPERTIES)
            ((VkPhysicalDeviceVulkan11Properties *)next)->subgroupSupportedOperations = VK_SUBGROUP_FEATURE_BASIC_BIT;
    }
}

static PFN_vkVoidFunction replaced(const char *name, PFN_vkVoidFunction function) {
    if (!function || (strcmp(name, "vkGetPhysicalDeviceProperties2") && strcmp(name, "vkGetPhysicalDeviceProperties2KHR")))
        return function;
    wrapped_properties = (PFN_vkGetPhysicalDeviceProperties2)function;
    return (PFN_vkVoidFunction)properties;
}

EXPORT PFN_vkVoidFunction vk_icdGetInstanceProcAddr(VkInstance instance, const char *name) {
    PFN_vkGetInstanceProcAddr get = (PFN_vkGetInstanceProcAddr)wrapped("vk_icdGetInstanceProcAddr");
    return replaced(name, get(instance, name));
}

EXPORT PFN_vkVoidFunction vk_icdGetPhysicalDeviceProcAddr(VkInstance instance, const char *name) {
    PFN_vkGetInstanceProcAddr get = (PFN_vkGetInstanceProcAddr)wrapped("vk_icdGetPhysicalDeviceProcAddr");
    return get ? replaced(name, get(instance, name)) : NULL;
}

EXPORT VkResult vk_icdNegotiateLoaderICDInterfaceVersion(uint32_t *version) {
    VkResult (*negotiate)(uint32_t *) = (VkResult(*)(uint32_t *))wrapped("vk_icdNegotiateLoaderICDInterfaceVersion");
    return negotiate ? negotiate(version) : VK_SUCCESS;
}
