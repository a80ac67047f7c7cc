# shellcheck shell=bash disable=SC2154
# For wgpu: the Vulkan loader and the driver of the NVIDIA GPU, where the system does not name them.

# Sets LD_LIBRARY_PATH and VK_DRIVER_FILES as far as needed. Of the libraries in gl/, those are used that the system has not.
find_vulkan() {
    local known library file
    known=$(PATH=$PATH:/usr/sbin:/sbin ldconfig -p 2>/dev/null | awk '/=>/ { print $1 }')
    rm -rf "$here/gl-used"
    mkdir -p "$here/gl-used"
    for library in "$here"/gl/*.so.*; do
        [ -e "$library" ] && ! grep -qxF "${library##*/}" <<<"$known" && ln -s "$library" "$here/gl-used/"
    done
    export LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$here/gl-used
    [ -z "${VK_DRIVER_FILES:-}${VK_ICD_FILENAMES:-}" ] || return 0
    # Where the loader looks by itself.
    for file in /usr/share/vulkan/icd.d/*nvidia*.json /etc/vulkan/icd.d/*nvidia*.json; do
        [ ! -e "$file" ] || return 0
    done
    for file in /usr/local/nvidia/share/vulkan/icd.d/*.json /usr/local/nvidia/vulkan/icd.d/*.json /run/opengl-driver/share/vulkan/icd.d/*nvidia*.json; do
        [ -e "$file" ] && export VK_DRIVER_FILES=$file && return
    done
    # A driver in a container without its description.
    for library in libGLX_nvidia.so.0 libEGL_nvidia.so.0; do
        if grep -qxF $library <<<"$known"; then
            file=$here/gl-used/nvidia_icd.json
            echo "{\"file_format_version\": \"1.0.0\", \"ICD\": {\"library_path\": \"$library\", \"api_version\": \"1.3.0\"}}" >"$file"
            export VK_DRIVER_FILES=$file
            return
        fi
    done
}

# Why there is no Vulkan device, and in vulkan.txt what the loader did.
why_no_vulkan() {
    {
        PATH=$PATH:/usr/sbin:/sbin ldconfig -p | grep -i 'vulkan\|nvidia\|libGL\|libEGL\|libX11\.'
        ls -l /usr/share/vulkan/icd.d /etc/vulkan/icd.d /usr/local/nvidia "$here/gl-used" 2>&1
        env | grep '^VK_\|^LD_LIBRARY_PATH'
        VK_LOADER_DEBUG=all timeout 20 "$here/kyklos" bench --device wgpu:0 --shape 1,64,1,1,64 --repeat 1
    } >"$files/vulkan.txt" 2>&1 </dev/null
    if ls "$here/gl-used/libvulkan.so.1" >/dev/null 2>&1 || PATH=$PATH:/usr/sbin:/sbin ldconfig -p | grep -q 'libvulkan\.so\.1'; then
        echo "the Vulkan loader finds no driver: vulkan.txt in RESULTS.tgz"
    else
        echo "there is no libvulkan.so.1, neither here nor in the pack"
    fi
}

# The kernels of a device that can be named, by its number: portable, and those for subgroups and for matrix units where it has them.
wgpu_kernels() {
    "$here/backends" --list 2>/dev/null | sed -n "s/^wgpu $1 \([a-z]*\) (.*/\1/p" | uniq | grep -v small | paste -sd ,
}

# The id of the device: that of NVIDIA, with any=1 the first one.
wgpu_device() {
    awk -F'"' -v any="$1" '$2 == "id" { id = $4 } $2 == "name" && id ~ /^wgpu/ && (any || /NVIDIA/) { print id; exit }' "$files/facts.txt"
}
