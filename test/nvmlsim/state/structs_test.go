package state

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
)

// The library and this package map the same file, so the layouts of the C structs in lib/state.h
// and of the Go structs must be equal.
func TestGoAndCStructsAgree(t *testing.T) {
	structs := map[string]reflect.Type{
		"nvmlsim_header":     reflect.TypeFor[Header](),
		"nvmlsim_profile":    reflect.TypeFor[Profile](),
		"nvmlsim_ci_profile": reflect.TypeFor[CIProfile](),
		"nvmlsim_model":      reflect.TypeFor[Model](),
		"nvmlsim_gpu":        reflect.TypeFor[GPU](),
		"nvmlsim_event":      reflect.TypeFor[Event](),
		"nvmlsim_fault":      reflect.TypeFor[Fault](),
	}
	want := map[string]string{}
	var program strings.Builder
	program.WriteString("#include <stddef.h>\n#include <stdio.h>\n#include \"state.h\"\nint main(void) {\n")
	ask := func(key, expression string, value any) {
		fmt.Fprintf(&program, "printf(\"%s %%llu\\n\", (unsigned long long)(%s));\n", key, expression)
		want[key] = fmt.Sprint(value)
	}
	for name, typ := range structs {
		ask("sizeof:"+name, "sizeof(struct "+name+")", typ.Size())
		for i := range typ.NumField() {
			field := typ.Field(i)
			c := field.Tag.Get("c")
			if c == "" {
				t.Fatalf("%s.%s names no C field", typ, field.Name)
			}
			ask(name+"."+c+":offset", fmt.Sprintf("offsetof(struct %s, %s)", name, c), field.Offset)
			ask(name+"."+c+":size", fmt.Sprintf("sizeof(((struct %s *)0)->%s)", name, c), field.Type.Size())
		}
	}
	ask("magic", "NVMLSIM_MAGIC", Magic)
	ask("layout", "NVMLSIM_LAYOUT", Layout)
	ask("absent", "NVMLSIM_ABSENT", Absent)
	ask("lock-write", "NVMLSIM_LOCK_WRITE", lockWrite)
	ask("lock-in-use", "NVMLSIM_LOCK_IN_USE", lockInUse)
	ask("lock-capabilities", "NVMLSIM_LOCK_CAPABILITIES", lockCapabilities)
	ask("lock-cut", "NVMLSIM_LOCK_CUT", lockCut)
	ask("lock-open", "NVMLSIM_LOCK_OPEN", lockOpen)
	ask("lock-compute", "NVMLSIM_LOCK_COMPUTE", lockCompute)
	ask("lock-subscribe", "NVMLSIM_LOCK_SUBSCRIBE", lockSubscribe)
	ask("compute-bytes", "NVMLSIM_COMPUTE_BYTES", computeBytes)
	ask("instance", "NVMLSIM_INSTANCE", instanceBit)
	ask("no-instance", "NVMLSIM_NO_INSTANCE", noInstanceWord)
	ask("cut-lock-driver", "NVMLSIM_CUT_LOCK_DRIVER", CutLockDriver)
	ask("cut-lock-gpu", "NVMLSIM_CUT_LOCK_GPU", CutLockGPU)
	ask("cut-lock-none", "NVMLSIM_CUT_LOCK_NONE", CutLockNone)
	ask("cut-lock-all", "NVMLSIM_CUT_LOCK_ALL", CutLockAll)
	ask("fault-slow", "NVMLSIM_FAULT_SLOW", FaultSlow)
	ask("fault-fail", "NVMLSIM_FAULT_FAIL", FaultFail)
	ask("fault-kill", "NVMLSIM_FAULT_KILL", FaultKill)
	program.WriteString("return 0; }\n")

	folder := t.TempDir()
	source, binary := filepath.Join(folder, "layout.c"), filepath.Join(folder, "layout")
	if err := os.WriteFile(source, []byte(program.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("gcc", "-Wall", "-Werror", "-I../lib", "-o", binary, source).CombinedOutput(); err != nil {
		t.Fatalf("gcc: %v\n%s", err, out)
	}
	out, err := exec.Command(binary).Output()
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(out)) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		if want[key] != value {
			t.Errorf("%s: C says %s, Go %s", key, value, want[key])
		}
		delete(want, key)
	}
	if len(want) > 0 {
		t.Errorf("C said nothing of %v", want)
	}
}
