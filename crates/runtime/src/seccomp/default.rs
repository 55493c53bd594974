//! The RuntimeDefault profile as a table: an allow list, widened by the capabilities a container has.
//! Everything else fails with EPERM, and calls newer than the table with ENOSYS, so that programs fall
//! back to what they did before.

use super::{Action, Argument, Operator, Profile, Rule};

const ALWAYS: &str = "
    accept accept4 access alarm arch_prctl bind brk capget capset chdir chmod chown clock_getres
    clock_gettime clock_nanosleep close close_range connect copy_file_range creat dup dup2 dup3 epoll_create
    epoll_create1 epoll_ctl epoll_ctl_old epoll_pwait epoll_pwait2 epoll_wait epoll_wait_old eventfd eventfd2
    execve execveat exit exit_group faccessat faccessat2 fadvise64 fallocate fanotify_mark fchdir fchmod
    fchmodat fchmodat2 fchown fchownat fcntl fdatasync fgetxattr flistxattr flock fork fremovexattr fsetxattr
    fstat fstatfs fsync ftruncate futex futex_waitv futimesat get_robust_list get_thread_area getcpu getcwd
    getdents getdents64 getegid geteuid getgid getgroups getitimer getpeername getpgid getpgrp getpid getppid
    getpriority getrandom getresgid getresuid getrlimit getrusage getsid getsockname getsockopt gettid
    gettimeofday getuid getxattr inotify_add_watch inotify_init inotify_init1 inotify_rm_watch io_cancel
    io_destroy io_getevents io_setup io_submit ioctl ioprio_get ioprio_set kill landlock_add_rule
    landlock_create_ruleset landlock_restrict_self lchown lgetxattr link linkat listen listxattr llistxattr
    lremovexattr lseek lsetxattr lstat madvise membarrier memfd_create memfd_secret mincore mkdir mkdirat
    mknod mknodat mlock mlock2 mlockall mmap modify_ldt mprotect mq_getsetattr mq_notify mq_open
    mq_timedreceive mq_timedsend mq_unlink mremap mseal msgctl msgget msgrcv msgsnd msync munlock munlockall
    munmap name_to_handle_at nanosleep newfstatat open openat openat2 pause pidfd_open pidfd_send_signal pipe
    pipe2 pkey_alloc pkey_free pkey_mprotect poll ppoll prctl pread64 preadv preadv2 prlimit64
    process_mrelease pselect6 ptrace pwrite64 pwritev pwritev2 read readahead readlink readlinkat readv
    recvfrom recvmmsg recvmsg remap_file_pages removexattr rename renameat renameat2 restart_syscall rmdir
    rseq rt_sigaction rt_sigpending rt_sigprocmask rt_sigqueueinfo rt_sigreturn rt_sigsuspend rt_sigtimedwait
    rt_tgsigqueueinfo sched_get_priority_max sched_get_priority_min sched_getaffinity sched_getattr
    sched_getparam sched_getscheduler sched_rr_get_interval sched_setaffinity sched_setattr sched_setparam
    sched_setscheduler sched_yield seccomp select semctl semget semop semtimedop sendfile sendmmsg sendmsg
    sendto set_robust_list set_thread_area set_tid_address setfsgid setfsuid setgid setgroups setitimer
    setpgid setpriority setregid setresgid setresuid setreuid setrlimit setsid setsockopt setuid setxattr
    shmat shmctl shmdt shmget shutdown sigaltstack signalfd signalfd4 socketpair splice stat statfs statx
    symlink symlinkat sync sync_file_range syncfs sysinfo tee tgkill time timer_create timer_delete
    timer_getoverrun timer_gettime timer_settime timerfd_create timerfd_gettime timerfd_settime times tkill
    truncate umask uname unlink unlinkat utime utimensat utimes vfork vmsplice wait4 waitid write writev
";

/// More calls for whoever holds a capability.
const BY_CAPABILITY: &[(u32, &str)] = &[
    (CAP_DAC_READ_SEARCH, "open_by_handle_at"),
    (
        CAP_SYS_ADMIN,
        "bpf clone clone3 fanotify_init fsconfig fsmount fsopen fspick lookup_dcookie lsm_get_self_attr \
         lsm_list_modules lsm_set_self_attr mount mount_setattr move_mount open_tree perf_event_open quotactl \
         quotactl_fd setdomainname sethostname setns syslog umount2 unshare",
    ),
    (CAP_SYS_BOOT, "reboot"),
    (CAP_SYS_CHROOT, "chroot"),
    (CAP_SYS_MODULE, "delete_module init_module finit_module"),
    (CAP_SYS_PACCT, "acct"),
    (
        CAP_SYS_PTRACE,
        "kcmp pidfd_getfd process_madvise process_vm_readv process_vm_writev",
    ),
    (CAP_SYS_RAWIO, "iopl ioperm"),
    (CAP_SYS_TIME, "settimeofday clock_settime adjtimex clock_adjtime"),
    (CAP_SYS_TTY_CONFIG, "vhangup"),
    (
        CAP_SYS_NICE,
        "get_mempolicy mbind set_mempolicy set_mempolicy_home_node",
    ),
    (CAP_SYSLOG, "syslog"),
    (CAP_BPF, "bpf"),
    (CAP_PERFMON, "perf_event_open"),
];

pub const CAP_DAC_READ_SEARCH: u32 = 2;
pub const CAP_SYS_MODULE: u32 = 16;
pub const CAP_SYS_RAWIO: u32 = 17;
pub const CAP_SYS_CHROOT: u32 = 18;
pub const CAP_SYS_PTRACE: u32 = 19;
pub const CAP_SYS_PACCT: u32 = 20;
pub const CAP_SYS_ADMIN: u32 = 21;
pub const CAP_SYS_BOOT: u32 = 22;
pub const CAP_SYS_NICE: u32 = 23;
pub const CAP_SYS_TIME: u32 = 25;
pub const CAP_SYS_TTY_CONFIG: u32 = 26;
pub const CAP_SYSLOG: u32 = 34;
pub const CAP_PERFMON: u32 = 38;
pub const CAP_BPF: u32 = 39;

const NEW_NAMESPACES: u64 = (libc::CLONE_NEWNS
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET
    | libc::CLONE_NEWCGROUP) as u32 as u64;

/// The profile for a process with these capabilities (the bounding set's bits).
pub fn profile(capabilities: u64) -> Profile {
    let has = |capability: u32| capabilities & (1 << capability) != 0;
    let mut syscalls = vec![Rule::plain(ALWAYS.split_whitespace(), Action::Allow)];
    for (capability, names) in BY_CAPABILITY {
        if has(*capability) {
            syscalls.push(Rule::plain(names.split_whitespace(), Action::Allow));
        }
    }
    for persona in [0, 0x0008, 0x20000, 0x20008, 0xffff_ffff] {
        syscalls.push(Rule::on(
            "personality",
            Argument::new(0, Operator::EqualTo, persona, 0),
        ));
    }
    // Sockets to the hypervisor do not belong to a container's network.
    syscalls.push(Rule::on(
        "socket",
        Argument::new(0, Operator::NotEqual, libc::AF_VSOCK as u64, 0),
    ));
    if !has(CAP_SYS_ADMIN) {
        let no_namespaces = Argument::new(0, Operator::MaskedEqual, NEW_NAMESPACES, 0);
        syscalls.push(Rule::on("clone", no_namespaces));
        // The flags of clone3 are in memory, out of the filter's sight: libraries then use clone.
        syscalls.push(Rule {
            names: vec!["clone3".into()],
            action: Action::Errno,
            errno_ret: Some(libc::ENOSYS as u32),
            args: Vec::new(),
        });
    }
    Profile {
        default_action: Action::Errno,
        default_errno_ret: None,
        syscalls,
    }
}
