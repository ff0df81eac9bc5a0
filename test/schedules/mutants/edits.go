package main

import (
	"errors"
	"fmt"
	"go/ast"
	"go/token"
	"slices"
	"strings"
)

// edit is one kind of change to a function of the plugin. It finds the code to change by syntax,
// and returns an error unless exactly one piece of code matches.
type edit interface {
	changes(f *function) ([]change, error)
}

// change is a replacement for part of a source file: text takes the place of the bytes from offset
// from to offset to.
type change struct {
	from, to token.Pos
	text     string
}

func replace(n ast.Node, text string) []change { return []change{{n.Pos(), n.End(), text}} }

// skip removes a call whose only result is an error, and puts nil in its place.
type skip struct{ call }

func (e skip) changes(f *function) ([]change, error) {
	c, err := e.find(f)
	if err != nil {
		return nil, err
	}
	return replace(c, "func() error { return nil; return "+f.text(c)+" }()"), nil
}

// ignore keeps a call but replaces the error that the call returns with nil.
type ignore struct{ call }

func (e ignore) changes(f *function) ([]change, error) {
	c, err := e.find(f)
	if err != nil {
		return nil, err
	}
	return replace(c, "func() error { _ = "+f.text(c)+"; return nil }()"), nil
}

// lastArgument replaces the last argument of a call with the text in field becomes. A $ in that
// text stands for the old argument. If the text is empty, the edit removes the argument.
type lastArgument struct {
	call
	becomes string
}

func (e lastArgument) changes(f *function) ([]change, error) {
	c, err := e.find(f)
	if err != nil {
		return nil, err
	}
	if len(c.Args) < 2 {
		return nil, fmt.Errorf("the call to %s has fewer than two arguments", e.to)
	}
	before, last := c.Args[len(c.Args)-2], c.Args[len(c.Args)-1]
	if e.becomes == "" {
		return []change{{before.End(), c.Rparen, ""}}, nil
	}
	return replace(last, strings.ReplaceAll(e.becomes, "$", f.text(last))), nil
}

// compareLengths finds the call slices.EqualFunc(a, b, by), where by is the field's value. It
// replaces the call with a comparison of the lengths of a and b.
type compareLengths struct{ by string }

func (e compareLengths) changes(f *function) ([]change, error) {
	c, err := one(collect(f, func(c *ast.CallExpr) bool {
		return lastName(c.Fun) == "EqualFunc" && len(c.Args) == 3 && lastName(c.Args[2]) == e.by
	}), "comparison by "+e.by)
	if err != nil {
		return nil, err
	}
	return replace(c, fmt.Sprintf("(len(%s) == len(%s))", f.text(c.Args[0]), f.text(c.Args[1]))), nil
}

// doNothing makes a function whose only result is an error return nil at once.
type doNothing struct{}

func (doNothing) changes(f *function) ([]change, error) {
	if r := f.Type.Results; r.NumFields() != 1 || lastName(r.List[0].Type) != "error" {
		return nil, errors.New("the function returns something else than an error")
	}
	return []change{{f.Body.Lbrace + 1, f.Body.Lbrace + 1, " return nil;"}}, nil
}

// condition finds the only if or case whose condition contains the name in field has. The changed
// function still evaluates that condition, but then goes on as if the result were the value in
// field is.
type condition struct {
	has string
	is  bool
}

func (e condition) changes(f *function) ([]change, error) {
	var found []ast.Expr
	ast.Inspect(f.Body, func(n ast.Node) bool {
		switch s := n.(type) {
		case *ast.IfStmt:
			if mentions(s.Cond, e.has) || s.Init != nil && mentions(s.Init, e.has) {
				found = append(found, s.Cond)
			}
		case *ast.SwitchStmt:
			if s.Tag != nil {
				break
			}
			for _, c := range s.Body.List {
				for _, expr := range c.(*ast.CaseClause).List {
					if mentions(expr, e.has) {
						found = append(found, expr)
					}
				}
			}
		}
		return true
	})
	c, err := one(found, "condition with "+e.has)
	if err != nil {
		return nil, err
	}
	if e.is {
		return replace(c, "("+f.text(c)+") || true"), nil
	}
	return replace(c, "("+f.text(c)+") && false"), nil
}

// dropOperand finds the only operand of && or || that contains the name in field has, and removes
// it.
type dropOperand struct{ has string }

func (e dropOperand) changes(f *function) ([]change, error) {
	o, err := findOperand(f, e.has)
	if err != nil {
		return nil, err
	}
	return replace(o.parent, f.text(o.sibling)), nil
}

// keepOperand finds the only operand of && or || that contains the name in field has, and replaces
// the whole condition with that operand.
type keepOperand struct{ has string }

func (e keepOperand) changes(f *function) ([]change, error) {
	o, err := findOperand(f, e.has)
	if err != nil {
		return nil, err
	}
	return replace(o.condition, f.text(o.expr)), nil
}

// operand is one side of && or || that is not itself such an expression. sibling is the other side,
// parent is both together, and condition is the outermost expression.
type operand struct {
	expr, sibling     ast.Expr
	parent, condition *ast.BinaryExpr
}

func findOperand(f *function, has string) (operand, error) {
	var found []operand
	var walk func(condition, b *ast.BinaryExpr)
	walk = func(condition, b *ast.BinaryExpr) {
		for _, side := range [][2]ast.Expr{{b.X, b.Y}, {b.Y, b.X}} {
			if below, ok := logical(side[0]); ok {
				walk(condition, below)
			} else if mentions(side[0], has) {
				found = append(found, operand{side[0], side[1], b, condition})
			}
		}
	}
	ast.Inspect(f.Body, func(n ast.Node) bool {
		b, ok := logical(n)
		if ok {
			walk(b, b)
		}
		return !ok
	})
	return one(found, "operand with "+has)
}

func logical(n ast.Node) (*ast.BinaryExpr, bool) {
	if p, ok := n.(*ast.ParenExpr); ok {
		return logical(p.X)
	}
	b, ok := n.(*ast.BinaryExpr)
	return b, ok && (b.Op == token.LAND || b.Op == token.LOR)
}

// emptyRange makes the function's only range loop iterate over nothing.
type emptyRange struct{}

func (emptyRange) changes(f *function) ([]change, error) {
	loop, err := one(collect(f, func(*ast.RangeStmt) bool { return true }), "loop with range")
	if err != nil {
		return nil, err
	}
	return replace(loop.X, f.text(loop.X)+"[:0]"), nil
}

// instead finds the only use of the name in field of, and puts the name in field use in its place.
type instead struct{ of, use string }

func (e instead) changes(f *function) ([]change, error) {
	name, err := one(collect(f, func(i *ast.Ident) bool { return i.Name == e.of }), "use of "+e.of)
	if err != nil {
		return nil, err
	}
	return replace(name, e.use), nil
}

// unset removes the only statement that assigns to the given struct field and to nothing else.
type unset struct{ field string }

func (e unset) changes(f *function) ([]change, error) {
	a, err := one(collect(f, func(a *ast.AssignStmt) bool {
		if len(a.Lhs) != 1 {
			return false
		}
		s, ok := a.Lhs[0].(*ast.SelectorExpr)
		return ok && s.Sel.Name == e.field
	}), "assignment to "+e.field+" alone")
	if err != nil {
		return nil, err
	}
	return replace(a, "_ = "+f.text(a.Lhs[0])), nil
}

// literalField replaces the value of a field in the function's only composite literal that sets the
// field.
type literalField struct{ field, value string }

func (e literalField) changes(f *function) ([]change, error) {
	kv, err := one(collect(f, func(kv *ast.KeyValueExpr) bool { return lastName(kv.Key) == e.field }),
		"field "+e.field+" in a composite literal")
	if err != nil {
		return nil, err
	}
	return replace(kv.Value, e.value), nil
}

// call finds the only call to the function or method that the field to names. If the field after is
// not empty, it finds the first such call behind the only call to the function that after names.
type call struct{ to, after string }

func (c call) find(f *function) (*ast.CallExpr, error) {
	calls := callsTo(f, c.to)
	if c.after == "" {
		return one(calls, "call to "+c.to)
	}
	before, err := one(callsTo(f, c.after), "call to "+c.after)
	if err != nil {
		return nil, err
	}
	calls = slices.DeleteFunc(calls, func(c *ast.CallExpr) bool { return c.Pos() < before.End() })
	if len(calls) == 0 {
		return nil, fmt.Errorf("no call to %s after the call to %s", c.to, c.after)
	}
	return calls[0], nil
}

func callsTo(f *function, name string) []*ast.CallExpr {
	return collect(f, func(c *ast.CallExpr) bool { return lastName(c.Fun) == name })
}

// collect returns the syntax nodes of a function's body for which match returns true, in the order
// of the source.
func collect[N ast.Node](f *function, match func(N) bool) []N {
	var found []N
	ast.Inspect(f.Body, func(n ast.Node) bool {
		if n, ok := n.(N); ok && match(n) {
			found = append(found, n)
		}
		return true
	})
	return found
}

// one returns the only element of the slice found. It returns an error if there is none or more
// than one. In the error, the text what says what was searched for.
func one[T any](found []T, what string) (T, error) {
	if len(found) != 1 {
		return *new(T), fmt.Errorf("%d places instead of one: %s", len(found), what)
	}
	return found[0], nil
}

// mentions reports whether an identifier called name occurs anywhere in a syntax node.
func mentions(n ast.Node, name string) (found bool) {
	ast.Inspect(n, func(n ast.Node) bool {
		i, ok := n.(*ast.Ident)
		found = found || ok && i.Name == name
		return !found
	})
	return found
}

// lastName returns the name at the end of an expression: F for F, x.F, and F[T].
func lastName(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.Ident:
		return e.Name
	case *ast.SelectorExpr:
		return e.Sel.Name
	case *ast.IndexExpr:
		return lastName(e.X)
	case *ast.IndexListExpr:
		return lastName(e.X)
	}
	return ""
}
