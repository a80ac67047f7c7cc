# A firmware for an emulated PC: reads a Linux kernel (the flat image of vmlinux) and an initramfs from the first ATA disk into
# memory and jumps to the kernel by the 64-bit boot protocol. Values from the command line: KERNEL_SECTORS, INITRD_SIZE, MEMORY.
        .set    LOW, 0x10000            # where the tables go
        .set    KERNEL, 0x1000000       # where vmlinux is linked to
        .set    INITRD, 0x8000000

        .code16
        .globl  _start
_start: cli
        cld
        lgdtl   %cs:(gdtr - _start)
        movl    %cr0, %eax
        orb     $1, %al
        movl    %eax, %cr0
        ljmpl   $0x08, $start32
        .balign 8
gdt:    .quad   0
        .quad   0x00cf9b000000ffff      # 0x08: 32-bit code
        .quad   0x00cf93000000ffff      # 0x10: data
        .quad   0x00af9b000000ffff      # 0x18: 64-bit code
gdtr:   .word   gdtr - gdt - 1
        .long   gdt

        .code32
start32:
        movl    $0x10, %eax
        movl    %eax, %ds
        movl    %eax, %es
        movl    %eax, %ss
        movl    $LOW, %esp
        movl    $tables, %esi
        movl    $LOW, %edi
        movl    $(tables_end - tables) / 4, %ecx
        rep movsl
        movw    $0x3f6, %dx             # no interrupts from the disk
        movb    $2, %al
        outb    %al, %dx
        movl    $KERNEL, %edi
        xorl    %ebx, %ebx
        movl    $KERNEL_SECTORS, %ebp
        call    read
        movl    $INITRD, %edi
        movl    $(INITRD_SIZE + 511) / 512, %ebp
        call    read
        movl    $0x20, %eax             # CR4.PAE
        movl    %eax, %cr4
        movl    $LOW + pml4 - tables, %eax
        movl    %eax, %cr3
        movl    $0xc0000080, %ecx       # EFER.LME
        rdmsr
        orl     $0x100, %eax
        wrmsr
        movl    $0x80000011, %eax       # CR0: paging, protection
        movl    %eax, %cr0
        ljmp    $0x18, $start64

# Reads %ebp sectors from sector %ebx on to %edi, up to 256 with one command.
read:   movw    $0x1f7, %dx
1:      inb     %dx, %al                # while busy
        testb   $0x80, %al
        jnz     1b
        movl    $256, %esi
        cmpl    %esi, %ebp
        cmovb   %ebp, %esi
        movl    %esi, %eax
        movw    $0x1f2, %dx             # count, three bytes of the sector's number, the rest with LBA and drive 0
        outb    %al, %dx
        movl    %ebx, %eax
        incl    %edx
        outb    %al, %dx
        shrl    $8, %eax
        incl    %edx
        outb    %al, %dx
        shrl    $8, %eax
        incl    %edx
        outb    %al, %dx
        shrl    $8, %eax
        orb     $0xe0, %al
        incl    %edx
        outb    %al, %dx
        incl    %edx
        movb    $0x20, %al              # READ SECTORS
        outb    %al, %dx
        addl    %esi, %ebx
        subl    %esi, %ebp
2:      movw    $0x1f7, %dx
        inb     %dx, %al
        testb   $0x80, %al
        jnz     2b
        testb   $0x01, %al
        jnz     fail
        testb   $0x08, %al
        jz      2b
        movw    $0x1f0, %dx
        movl    $256, %ecx
        rep insw
        decl    %esi
        jnz     2b
        testl   %ebp, %ebp
        jnz     read
        ret

fail:   movl    $quit, %esi             # the emulator's port that ends it
        movw    $0x8900, %dx
        movl    $8, %ecx
        rep outsb
        hlt
quit:   .ascii  "Shutdown"

        .code64
start64:
        movl    $LOW + params - tables, %esi
        movl    $KERNEL, %eax
        jmp     *%rax

        .balign 4096
tables:
pml4:   .quad   LOW + pdpt - tables + 3
        .balign 4096
pdpt:   .quad   0x00000083, 0x40000083, 0x80000083, 0xc0000083  # 4 GiB, one to one
        .balign 4096
params: .org    params - _start + 0x1e8
        .byte   2                       # e820_entries
        .org    params - _start + 0x1fe
        .word   0xaa55                  # boot_flag
        .org    params - _start + 0x202
        .ascii  "HdrS"
        .word   0x20f                   # version
        .org    params - _start + 0x210
        .byte   0xff                    # type_of_loader: another one
        .byte   1                       # loadflags: loaded high
        .org    params - _start + 0x218
        .long   INITRD, INITRD_SIZE
        .org    params - _start + 0x228
        .long   LOW + cmdline - tables
        .long   0x7fffffff              # initrd_addr_max
        .long   0x200000                # kernel_alignment
        .org    params - _start + 0x238
        .long   2047                    # cmdline_size
        .org    params - _start + 0x2d0
        .quad   0, 0x9f000              # e820_table: start, size, usable
        .long   1
        .quad   0x100000, MEMORY - 0x100000
        .long   1
        .org    params - _start + 0x1000
cmdline:
        .incbin "cmdline"
        .byte   0
        .balign 4
tables_end:

        .org    0xfff0
        .code16
        jmp     _start
        .org    0x10000
