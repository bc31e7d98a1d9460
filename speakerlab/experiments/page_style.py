"""How the page looks: CSS for wide windows, narrow ones and paper. Nothing comes in."""

STYLE = """
:root{color-scheme:light;--ink:#1c2733;--soft:#5b6773;--line:#e3e8ee;--pale:#f5f7f9;--blue:#1f5fa8}
*{box-sizing:border-box}
body{margin:0;background:var(--pale);color:var(--ink);font:16px/1.55 system-ui,-apple-system,
"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
main{max-width:1120px;margin:0 auto;padding:40px 32px 56px;background:#fff;min-height:100vh}
h1{font-size:1.75rem;line-height:1.2;margin:0 0 .3rem;letter-spacing:-.01em;overflow-wrap:anywhere}
h2{font-size:1.25rem;margin:3rem 0 1rem;padding-bottom:.35rem;border-bottom:2px solid var(--line);
overflow-wrap:anywhere}
h3{font-size:1rem;margin:1.8rem 0 .6rem}
p{margin:.4rem 0;max-width:75ch;overflow-wrap:anywhere}
.muted,figcaption,small,.card span,.card li{color:var(--soft)}
.muted,figcaption,.card span,.card li{font-size:.88rem}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(290px,100%),1fr));gap:14px;
margin-top:1.5rem}
.card{border:1px solid var(--line);border-left:4px solid var(--blue);border-radius:6px;
padding:14px 18px;overflow-wrap:anywhere;display:flex;flex-wrap:wrap;gap:10px 36px}
.card div{flex:1 1 220px}.card span{display:block}
.card b{display:block;font-size:2.2rem;line-height:1.25;font-variant-numeric:tabular-nums}
.card ul{flex:2 1 260px;list-style:none;margin:0;padding:.2rem 0 0}
.card li{line-height:1.5;padding:.1rem 0}.card li:first-child{color:var(--ink);font-weight:600}
.wide{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:.92rem;font-variant-numeric:tabular-nums}
th,td{padding:.5rem .55rem;text-align:right;vertical-align:top;white-space:nowrap;
border-bottom:1px solid var(--line)}
thead th{color:var(--soft);font-weight:600;font-size:.84rem;line-height:1.35;white-space:normal;
vertical-align:bottom}
th:first-child,td:first-child{text-align:left;padding-left:.2rem}
td small{display:block;font-size:.8rem;line-height:1.4}
.group th{text-align:left;font-weight:700;padding-top:1.1rem;white-space:normal}
.group small{font-weight:400;font-size:.85rem;margin-left:.4rem}
.last td{background:#eef4fb}.last td:first-child,.last td:nth-child(2){font-weight:700}
.last small{font-weight:400}
.conditions{width:auto}.conditions td svg{display:block;margin-top:.25rem}
.conditions td{padding-top:.4rem;padding-bottom:.4rem}.conditions td small{display:inline;
margin-left:.6rem}.conditions th:nth-child(5),.conditions td:nth-child(5){text-align:left}
.figures{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:22px 32px;align-items:start}
.figures .tall{grid-row:span 2}
figure{margin:0;break-inside:avoid}img{width:100%;height:auto;display:block}
figcaption{margin-top:.3rem;overflow-wrap:anywhere}
details{margin:.8rem 0}summary{cursor:pointer;color:var(--blue);font-weight:600;padding:.2rem 0}
.hardest{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:0 32px}
.hardest h4{font-size:.92rem;margin:.4rem 0;grid-column:1/-1}
.trial{border:1px solid var(--line);border-radius:6px;padding:10px 14px;margin-bottom:12px;
break-inside:avoid}
.trial .score{font-weight:700;font-variant-numeric:tabular-nums}
.side{display:grid;grid-template-columns:minmax(0,2fr) minmax(0,3fr);gap:12px;align-items:center;
margin-top:.35rem;font-size:.85rem;color:var(--soft);overflow-wrap:anywhere}
audio{display:block;width:100%;height:36px}
.facts{display:grid;gap:1.4rem 32px;
grid-template-columns:repeat(auto-fit,minmax(min(440px,100%),1fr))}
.facts h3{margin-top:.6rem}.facts dl{grid-template-columns:minmax(100px,max-content) minmax(0,1fr);
font-size:.9rem;gap:.2rem 1rem}.facts dd{margin:0}
dl{display:grid;grid-template-columns:minmax(110px,max-content) minmax(0,1fr);gap:.35rem 1.4rem;
margin:0}dt{color:var(--soft)}dd{margin:0;overflow-wrap:anywhere;max-width:75ch}
pre{margin:.4rem 0;padding:12px 14px;background:var(--pale);border-radius:6px;white-space:pre-wrap;
overflow-wrap:anywhere;font:.82rem/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
@media(max-width:760px){main{padding:24px 16px}
.figures,.hardest,dl{grid-template-columns:minmax(0,1fr)}dl{gap:.1rem}dd{margin-bottom:.6rem}}
@media(max-width:520px){.side{grid-template-columns:minmax(0,1fr);gap:4px}}
@media print{body,main{background:#fff}main{max-width:none;padding:0}h2,h3{break-after:avoid}
audio{display:none}}
"""
