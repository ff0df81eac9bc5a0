package machine

import (
	"crypto/rand"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// kubeletSysctls are the kernel-wide settings that a kubelet would change on the host, with the
// values that it wants. A kubelet leaves a setting alone that has this value already.
var kubeletSysctls = map[string]string{
	"vm/overcommit_memory": "1", "vm/panic_on_oom": "0", "kernel/panic": "10", "kernel/panic_on_oops": "1",
	"kernel/keys/root_maxkeys": "1000000", "kernel/keys/root_maxbytes": "25000000",
}

// hideHostValues gives the machine files of its own for some kernel-wide settings: the sysctls that
// a kubelet would change, and the boot ID, which must differ after a power cut.
func hideHostValues() error {
	values := map[string]string{}
	for name, value := range kubeletSysctls {
		values["/proc/sys/"+name] = value
	}
	id, err := newBootID()
	if err != nil {
		return err
	}
	values["/proc/sys/kernel/random/boot_id"] = id
	if err := os.MkdirAll("/run/machine", 0o755); err != nil {
		return err
	}
	// The files of the machine's own cover parts of /proc. The kernel lets a user namespace mount a
	// new proc, as for a Pod with hostUsers: false, only if the machine has one without covers too.
	if err := os.MkdirAll("/run/machine/proc", 0o755); err != nil {
		return err
	}
	if err := mount("proc", "/run/machine/proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
		return err
	}
	for path, value := range values {
		if _, err := os.Stat(path); err != nil {
			continue // this kernel has no such setting
		}
		own := filepath.Join("/run/machine", strings.ReplaceAll(strings.TrimPrefix(path, "/proc/sys/"), "/", "-"))
		if err := os.WriteFile(own, []byte(value+"\n"), 0o644); err != nil {
			return err
		}
		if err := unix.Mount(own, path, "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("mount the machine's own %s: %w", path, err)
		}
	}
	return nil
}

func newBootID() (string, error) {
	id := make([]byte, 16)
	if _, err := rand.Read(id); err != nil {
		return "", err
	}
	id[6], id[8] = id[6]&0x0f|0x40, id[8]&0x3f|0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", id[:4], id[4:6], id[6:8], id[8:10], id[10:]), nil
}
