package main

import (
	"go/format"
	"strings"
	"testing"
)

func TestEveryMutantApplies(t *testing.T) {
	if len(mutants) < 47 {
		t.Errorf("the table has %d mutants, and must keep 47", len(mutants))
	}
	names := map[string]bool{}
	for _, m := range mutants {
		if names[m.name] {
			t.Errorf("two mutants are called %q", m.name)
		}
		names[m.name] = true
		_, source, err := m.apply("../../..")
		if err != nil {
			t.Error(err)
			continue
		}
		if _, err := format.Source(source); err != nil {
			t.Errorf("mutant %q: %s: %s: the edit makes the source unreadable: %v", m.name, m.dir, m.function, err)
		}
	}
}

const example = `package example

func F(a, b []int) error {
	if x := G(a); x != nil && (y.Field || H()) && known {
		return x
	}
	for _, i := range a {
		s.Value = i
	}
	s.Value, s.Other = 1, T{Key: 1}
	if err := G(b, b...); err != nil || !slices.EqualFunc(a, b, same) {
		return err
	}
	switch {
	case late:
	}
	return nil
}

func (k S[T]) Two() (int, error) { return G(1), nil }
`

func TestEdits(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		edit edit
		// was is a piece of the example's source before the edit, and is is the same piece after it. If
		// was is empty, the edit must fail, and the error must contain the text of is.
		was, is string
	}{
		{skip{call{to: "H"}}, `H()`, `func() error { return nil; return H() }()`},
		{skip{call{to: "G"}}, "", "2 places instead of one: call to G"},
		{skip{call{to: "K"}}, "", "0 places instead of one: call to K"},
		{skip{call{"G", "H"}}, `G(b, b...)`, `func() error { return nil; return G(b, b...) }()`},
		{skip{call{"H", "EqualFunc"}}, "", "no call to H after the call to EqualFunc"},
		{ignore{call{to: "H"}}, `H()`, `func() error { _ = H(); return nil }()`},
		{lastArgument{call{"G", "H"}, ""}, `G(b, b...)`, `G(b)`},
		{lastArgument{call{"G", "H"}, "$[:0]"}, `G(b, b...)`, `G(b, b[:0]...)`},
		{lastArgument{call{to: "H"}, ""}, "", "the call to H has fewer than two arguments"},
		{compareLengths{"same"}, `slices.EqualFunc(a, b, same)`, `(len(a) == len(b))`},
		{compareLengths{"other"}, "", "0 places instead of one: comparison by other"},
		{doNothing{}, "error {\n\tif", "error { return nil;\n\tif"},
		{condition{"known", true}, `x != nil && (y.Field || H()) && known`, `(x != nil && (y.Field || H()) && known) || true`},
		{condition{"late", false}, `late`, `(late) && false`},
		{condition{"G", false}, "", "2 places instead of one: condition with G"},
		{dropOperand{"Field"}, `(y.Field || H())`, `(H())`},
		{dropOperand{"known"}, ` && known`, ``},
		{dropOperand{"b"}, `err != nil || !slices.EqualFunc(a, b, same)`, `err != nil`},
		{dropOperand{"nil"}, "", "2 places instead of one: operand with nil"},
		{keepOperand{"H"}, `x != nil && (y.Field || H()) && known`, `H()`},
		{emptyRange{}, `range a`, `range a[:0]`},
		{instead{"late", "early"}, `late`, `early`},
		{instead{"a", "b"}, "", "3 places instead of one: use of a"},
		{unset{"Value"}, `s.Value = i`, `_ = s.Value`},
		{unset{"Other"}, "", "0 places instead of one: assignment to Other alone"},
		{literalField{"Key", "2"}, `Key: 1`, `Key: 2`},
		{literalField{"Lock", "2"}, "", "0 places instead of one: field Lock in a composite literal"},
	} {
		found, err := functions("example.go", []byte(example))
		if err != nil {
			t.Fatal(err)
		}
		source, err := found[0].with(c.edit)
		switch {
		case c.was == "" && (err == nil || err.Error() != c.is):
			t.Errorf("%#v: error %v, want %s", c.edit, err, c.is)
		case c.was != "" && err != nil:
			t.Errorf("%#v: %v", c.edit, err)
		case c.was != "" && string(source) != strings.Replace(example, c.was, c.is, 1):
			t.Errorf("%#v makes this:\n%s", c.edit, source)
		}
	}
}

func TestUnresolvedMutantIsNamed(t *testing.T) {
	t.Parallel()
	for want, m := range map[string]mutant{
		`mutant "x": pkg/durable: gone: the package has no such function`:         {"x", durableDir, "gone", doNothing{}},
		`mutant "x": pkg/durable: Replace: 0 places instead of one: call to gone`: {"x", durableDir, "Replace", skip{call{to: "gone"}}},
	} {
		if _, _, err := m.apply("../../.."); err == nil || err.Error() != want {
			t.Errorf("error %v, want %s", err, want)
		}
	}
	found, err := functions("example.go", []byte(example))
	if err != nil {
		t.Fatal(err)
	}
	if name := found[1].name(); name != "S.Two" {
		t.Errorf("a method of a generic type is called %s, want S.Two", name)
	}
	if _, err := found[1].with(doNothing{}); err == nil {
		t.Error("a function with two results was made to do nothing")
	}
}
